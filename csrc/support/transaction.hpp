#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "support/log.hpp"

namespace memsaver {

// An undo stack. The undo of each step is appended after the step succeeded. Unless commit() is called, the destructor
// runs them, last first; an undo that throws is logged, and the rest still run.
class Transaction {
 public:
  Transaction() = default;
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;
  ~Transaction() { rollback(); }

  void on_rollback(std::function<void()> step) { undo_.push_back(std::move(step)); }
  void commit() noexcept { undo_.clear(); }

  void rollback() noexcept {
    while (!undo_.empty()) {
      auto step = std::move(undo_.back());
      undo_.pop_back();
      try {
        step();
      } catch (const std::exception& error) {
        warn(std::string("while undoing: ") + error.what());
      }
    }
  }

 private:
  std::vector<std::function<void()>> undo_;
};

}  // namespace memsaver
