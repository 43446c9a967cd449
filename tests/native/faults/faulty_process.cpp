#include "faults/faulty_process.hpp"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

namespace memsaver::hibernate {

FaultyProcess::FaultyProcess(std::unique_ptr<Process> process, const std::string& pid)
    : process_(std::move(process)),
      plan_(std::filesystem::read_symlink("/proc/self/exe").replace_filename("step-faults." + pid)) {}

void FaultyProcess::take(const std::string& step, const std::function<void()>& real) {
  struct Fault {
    std::string step;
    unsigned times;
    std::string kind;
  };
  std::vector<Fault> rest;
  bool failing = false;
  bool after = false;
  std::ifstream plan(plan_);
  for (Fault fault; plan >> fault.step >> fault.times >> fault.kind;) {
    if (fault.step == step && fault.times > 0) {
      failing = true;
      after = fault.kind == "after";
      lost_ = lost_ || fault.kind == "lost";
      --fault.times;
    }
    if (fault.times > 0) rest.push_back(fault);
  }
  if (failing) {
    if (rest.empty()) std::remove(plan_.c_str());
    std::ofstream changed;
    if (!rest.empty()) changed.open(plan_);
    for (const auto& fault : rest) changed << fault.step << ' ' << fault.times << ' ' << fault.kind << '\n';
  }
  if (!lost_ && (!failing || after)) real();
  if (failing || lost_) throw StepError(step, "INJECTED");
}

const char* FaultyProcess::state() { return lost_ ? "failed" : process_->state(); }
void FaultyProcess::lock(unsigned timeout_ms) {
  take("lock", [&] { process_->lock(timeout_ms); });
}
ByDevice FaultyProcess::checkpoint(const std::vector<std::string>& devices) {
  ByDevice held;
  take("checkpoint", [&] { held = process_->checkpoint(devices); });
  return held;
}
void FaultyProcess::restore(const ByDevice& held) {
  take("restore", [&] { process_->restore(held); });
}
void FaultyProcess::unlock() {
  take("unlock", [&] { process_->unlock(); });
}

}  // namespace memsaver::hibernate
