#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>

namespace memsaver {

// The progress of the operation under way; written by its threads, read by any.
struct Progress {
  enum class Operation { none, release, resume };
  std::atomic<Operation> operation{Operation::none};
  std::atomic<std::size_t> total_bytes{0};   // content to keep or restore
  std::atomic<std::size_t> done_bytes{0};    // copied, or found unchanged or zero
  std::atomic<std::size_t> copied_bytes{0};  // copied over the link, or to or from the file
  std::atomic<std::chrono::steady_clock::rep> started{0};

  void begin(Operation what, std::size_t total) {
    total_bytes = total;
    done_bytes = 0;
    copied_bytes = 0;
    started = std::chrono::steady_clock::now().time_since_epoch().count();
    operation = what;
  }
  void end() { operation = Operation::none; }
  [[nodiscard]] double seconds() const {
    if (operation == Operation::none) return 0;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration<double>(now - std::chrono::steady_clock::duration(started.load())).count();
  }
};

// Adds the duration of a scope to a sum, in seconds.
class Stopwatch {
 public:
  explicit Stopwatch(double& sum) : sum_(sum), start_(std::chrono::steady_clock::now()) {}
  Stopwatch(const Stopwatch&) = delete;
  ~Stopwatch() { sum_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  double& sum_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace memsaver
