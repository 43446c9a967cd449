#include "hibernate/faulty_process.hpp"

#include <utility>

namespace memsaver::hibernate {

FaultyProcess::FaultyProcess(std::unique_ptr<Process> process) : process_(std::move(process)) {}

void FaultyProcess::fail(const std::string& step, unsigned times, bool lost) { faults_[step] = {times, lost}; }

void FaultyProcess::enter(const std::string& step) {
  const auto fault = faults_.find(step);
  if (fault == faults_.end() || fault->second.times == 0) return;
  --fault->second.times;
  if (fault->second.lost) process_->lose();
  throw StepError(step, "INJECTED");
}

const char* FaultyProcess::state() { return process_->state(); }
void FaultyProcess::lock(unsigned timeout_ms) {
  enter("lock");
  process_->lock(timeout_ms);
}
ByDevice FaultyProcess::checkpoint(const ByDevice& devices) {
  enter("checkpoint");
  return process_->checkpoint(devices);
}
void FaultyProcess::restore(const ByDevice& held) {
  enter("restore");
  process_->restore(held);
}
void FaultyProcess::unlock() {
  enter("unlock");
  process_->unlock();
}
void FaultyProcess::lose() { process_->lose(); }

}  // namespace memsaver::hibernate
