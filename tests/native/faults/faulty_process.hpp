#pragma once

#include <functional>
#include <memory>
#include <string>

#include "hibernate/process.hpp"

namespace memsaver::hibernate {

// Any process, with steps that fail on request, before they reach the driver or after.
//
// The plan is a file next to the program's own, `step-faults.<process id>`, with one line for each step ("lock",
// "checkpoint", "restore", "unlock"): "<step> <times> <error | after | lost>". With "after" the driver takes the
// step first; after "lost" the process counts as one that cannot be restored. Written by
// tests.native.injection.fail_step().
class FaultyProcess final : public Process {
 public:
  FaultyProcess(std::unique_ptr<Process> process, const std::string& pid);

  const char* state() override;
  void lock(unsigned timeout_ms) override;
  ByDevice checkpoint(const std::vector<std::string>& devices) override;
  void restore(const ByDevice& held) override;
  void unlock() override;

 private:
  void take(const std::string& step, const std::function<void()>& real);

  std::unique_ptr<Process> process_;
  std::string plan_;
  bool lost_ = false;
};

}  // namespace memsaver::hibernate
