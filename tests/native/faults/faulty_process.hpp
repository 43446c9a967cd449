#pragma once

#include <memory>
#include <string>

#include "hibernate/process.hpp"

namespace memsaver::hibernate {

// Any process, with steps that fail on request, without reaching the driver.
//
// The plan is a file next to the program's own, `step-faults.<process id>`, with one line for each step ("lock",
// "checkpoint", "restore", "unlock"): "<step> <times> <error | lost>". After "lost" the process counts as one that
// cannot be restored. Written by tests.native.injection.fail_step().
class FaultyProcess final : public Process {
 public:
  FaultyProcess(std::unique_ptr<Process> process, const std::string& pid);

  const char* state() override;
  void lock(unsigned timeout_ms) override;
  ByDevice checkpoint(const ByDevice& devices) override;
  void restore(const ByDevice& held) override;
  void unlock() override;

 private:
  void enter(const std::string& step);

  std::unique_ptr<Process> process_;
  std::string plan_;
  bool lost_ = false;
};

}  // namespace memsaver::hibernate
