#pragma once

#include <utility>
#include <vector>

#include "support/log.hpp"

namespace memsaver {

// Owns steps that run at the end of a scope, last first: the undo of what succeeded, unless dismissed by then, or what
// must happen however the scope is left. A step that throws is logged, and the others still run.
class Cleanup {
 public:
  Cleanup() = default;
  explicit Cleanup(std::function<void()> step) { add(std::move(step)); }
  Cleanup(const Cleanup&) = delete;
  ~Cleanup() { run(); }

  void add(std::function<void()> step) { steps_.push_back(std::move(step)); }
  void dismiss() noexcept { steps_.clear(); }
  // Runs the steps now, not at the end of the scope.
  void run() noexcept {
    while (!steps_.empty()) {
      const auto step = std::move(steps_.back());
      steps_.pop_back();
      attempt("while undoing", step);
    }
  }

 private:
  std::vector<std::function<void()>> steps_;
};

}  // namespace memsaver
