#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>

namespace memsaver {

// How far an operation is; written by its threads, read by anyone.
struct Progress {
  enum class Operation { none, release, resume };
  std::atomic<Operation> operation{Operation::none};
  std::atomic<std::size_t> total_bytes{0};   // content to deal with
  std::atomic<std::size_t> done_bytes{0};    // dealt with: copied, or found unchanged or zero
  std::atomic<std::size_t> copied_bytes{0};  // crossed the link, or went to or came from the file
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

}  // namespace memsaver
