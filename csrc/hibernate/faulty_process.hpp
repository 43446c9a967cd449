#pragma once

#include <map>
#include <memory>
#include <string>

#include "hibernate/process.hpp"

namespace memsaver::hibernate {

// Any process, with steps that fail on request: what tests use to fail each of them in turn.
class FaultyProcess final : public Process {
 public:
  explicit FaultyProcess(std::unique_ptr<Process> process);

  // The next `times` of `step` ("lock", "checkpoint", "restore", "unlock") fail without reaching the driver. With
  // `lost` the process cannot be restored from then on, either.
  void fail(const std::string& step, unsigned times, bool lost);

  const char* state() override;
  void lock(unsigned timeout_ms) override;
  ByDevice checkpoint(const ByDevice& devices) override;
  void restore(const ByDevice& held) override;
  void unlock() override;
  void lose() override;

 private:
  struct Fault {
    unsigned times;
    bool lost;
  };
  void enter(const std::string& step);

  std::unique_ptr<Process> process_;
  std::map<std::string, Fault> faults_;
};

}  // namespace memsaver::hibernate
