#pragma once

#include <condition_variable>

#include "support/log.hpp"
#include "support/mutex.hpp"
#include "support/system.hpp"

namespace memsaver {

// Owns a thread that runs `work` when requested, one run at a time. Any thread may call any function.
class Background {
 public:
  // `purpose` follows "no thread can be started to" in a warning.
  Background(const char* purpose, std::function<void()> work) : purpose_(purpose), work_(std::move(work)) {}
  ~Background() { join(); }

  // Requests a run that begins after this call. Requests until it begins are one. Warns if no thread can be started.
  void request() EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    requested_ = true;
    if (running_) return;
    if (thread_.joinable()) thread_.join();
    failure_ = nullptr;
    auto thread = sys::start_thread([this] { run(); });
    running_ = requested_ = thread.has_value();
    if (thread) {
      thread_ = std::move(*thread);
    } else {
      warn("no thread can be started to " + std::string(purpose_));
    }
  }
  // Waits until nothing runs or is requested. Throws what the last run threw.
  void wait() EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    while (running_) idle_.wait(mutex_);
    if (failure_) std::rethrow_exception(failure_);
  }
  // Waits until the thread has ended. Only when there are no more requests.
  void join() NO_THREAD_SAFETY_ANALYSIS {
    if (thread_.joinable()) thread_.join();
  }
  // Forgets the thread: a forked child has none.
  void abandon() NO_THREAD_SAFETY_ANALYSIS {
    if (thread_.joinable()) thread_.detach();
  }

 private:
  void run() EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    while (std::exchange(requested_, false)) {
      mutex_.unlock();
      const std::exception_ptr failure = sys::failure_of(work_);
      mutex_.lock();
      failure_ = failure;
    }
    running_ = false;
    idle_.notify_all();
  }

  const char* const purpose_;
  const std::function<void()> work_;
  Mutex mutex_;
  std::condition_variable_any idle_;
  std::thread thread_ GUARDED_BY(mutex_);
  bool running_ GUARDED_BY(mutex_) = false;
  bool requested_ GUARDED_BY(mutex_) = false;
  std::exception_ptr failure_ GUARDED_BY(mutex_);  // of the last run
};

}  // namespace memsaver
