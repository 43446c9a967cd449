#pragma once

#include <condition_variable>
#include <deque>
#include <memory>

#include "support/mutex.hpp"
#include "support/system.hpp"

namespace memsaver {

// Owns up to `most` threads that run the parts of tasks, oldest task first. They start when first needed, and stay: to
// start threads for each task would delay the page faults of running ones. Only one thread may call its functions.
class Crew {
 public:
  explicit Crew(std::size_t most) : most_(most) {}
  Crew(const Crew&) = delete;
  // Waits until all parts are done.
  ~Crew() {
    {
      const Lock lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  // Runs `work(part)` for each part below `parts`, at least one. The result is ready when all are done, and throws what
  // the first that failed threw. If the system refuses every thread, the first caller that waits does the work.
  [[nodiscard]] std::shared_future<void> run(std::size_t parts, std::function<void(std::size_t)> work) {
    for (const std::size_t wanted = std::min(most_, left() + parts); threads_.size() < wanted;) {
      auto thread = sys::start_thread([this] { serve(); });
      if (!thread) break;
      threads_.push_back(std::move(*thread));
    }
    if (threads_.empty()) {
      const auto all = [parts, work = std::move(work)] {
        for (std::size_t part = 0; part < parts; ++part) work(part);
      };
      return std::async(std::launch::deferred, all).share();
    }
    const auto task = std::make_shared<Task>(parts, std::move(work));
    {
      const Lock lock(mutex_);
      tasks_.push_back(task);
      left_ += parts;
    }
    changed_.notify_all();
    return task->done.get_future().share();
  }

 private:
  struct Task {
    Task(std::size_t parts, std::function<void(std::size_t)> work) : parts(parts), left(parts), work(std::move(work)) {}

    const std::size_t parts;
    std::size_t next = 0;  // part to start
    std::size_t left;      // parts that are not done
    const std::function<void(std::size_t)> work;
    std::exception_ptr failure;
    std::promise<void> done;
  };

  std::size_t left() EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    return left_;
  }

  void serve() EXCLUDES(mutex_) {
    Lock lock(mutex_);
    for (;;) {
      while (tasks_.empty() && !ending_) changed_.wait(mutex_);
      if (tasks_.empty()) return;
      const std::shared_ptr<Task> task = tasks_.front();
      const std::size_t part = task->next++;
      if (task->next == task->parts) tasks_.pop_front();
      lock.unlock();
      const std::exception_ptr failure = sys::failure_of([&] { task->work(part); });
      lock.lock();
      if (failure && !task->failure) task->failure = failure;
      --left_;
      if (--task->left > 0) continue;
      task->failure ? task->done.set_exception(task->failure) : task->done.set_value();
    }
  }

  const std::size_t most_;
  std::vector<std::thread> threads_;
  Mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<std::shared_ptr<Task>> tasks_ GUARDED_BY(mutex_);  // with parts to start
  std::size_t left_ GUARDED_BY(mutex_) = 0;                     // parts of all tasks that are not done
  bool ending_ GUARDED_BY(mutex_) = false;
};

}  // namespace memsaver
