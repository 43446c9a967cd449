#pragma once

#include <cerrno>
#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "support/system.hpp"

namespace memsaver {

// Failures of calls to the operating system, planned as FaultyDriver plans those of the driver.
struct SystemFaults {
  std::mutex mutex;
  std::map<std::string, std::size_t> counts;
  std::string call;
  std::size_t nth = 0;
  std::size_t times = 0;
  int code = 0;
  std::size_t failures = 0;
  bool without_unnamed_files = false;  // as on file systems that do not know O_TMPFILE

  [[nodiscard]] bool met() {
    const std::lock_guard<std::mutex> lock(mutex);
    return failures > 0;
  }
  void plan(const std::string& which, std::size_t from_now, int error, std::size_t how_often) {
    const std::lock_guard<std::mutex> lock(mutex);
    call = which;
    nth = counts[which] + from_now;
    code = error;
    times = how_often;
  }
  // Cancels planned failures. Returns whether any happened.
  bool heal() {
    const std::lock_guard<std::mutex> lock(mutex);
    call.clear();
    return std::exchange(failures, 0) > 0;
  }
};

inline SystemFaults& system_faults() {
  static SystemFaults faults;
  return faults;
}

// The hook to put into sys::hook.
inline int on_system_call(const char* call, std::size_t) {
  auto& faults = system_faults();
  const std::lock_guard<std::mutex> lock(faults.mutex);
  const std::size_t count = ++faults.counts[call];
  if (faults.without_unnamed_files && call == std::string("open")) return EOPNOTSUPP;
  if (faults.call != call || count < faults.nth || count - faults.nth >= faults.times) return 0;
  ++faults.failures;
  return faults.code;
}

}  // namespace memsaver
