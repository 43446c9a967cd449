#pragma once

#include <cstddef>
#include <map>
#include <stdexcept>
#include <string>

namespace memsaver::hibernate {

// Bytes by the name of a device.
using ByDevice = std::map<std::string, std::size_t>;

// A step that failed: the driver's names of the call and of the error; where memory is short, of which device and how
// much. None of these names has a blank in it.
struct StepError : std::runtime_error {
  StepError(const std::string& failed_call, const std::string& error_code)
      : std::runtime_error(failed_call + " failed: " + error_code), call(failed_call), code(error_code) {}

  std::string call;
  std::string code;
  std::string device;
  std::size_t needed_bytes = 0;
  std::size_t free_bytes = 0;
};

// Another process, of whose devices the driver can take a checkpoint: running -> locked -> checkpointed and back.
// A step throws StepError and has then had no effect, as far as the driver keeps to that: ask state().
class Process {
 public:
  virtual ~Process() = default;

  // The driver's own account: running, locked, checkpointed, failed (it cannot be restored), or unknown.
  [[nodiscard]] virtual const char* state() = 0;

  // Device calls of the process wait from now on; those in flight get `timeout_ms` to end.
  virtual void lock(unsigned timeout_ms) = 0;
  // Gives all device memory of the process back. Returns what it held of `devices`, where that can be told.
  virtual ByDevice checkpoint(const ByDevice& devices) = 0;
  // Takes it again. `held` is what checkpoint() returned: where less is free, StepError is thrown before the driver is
  // asked.
  virtual void restore(const ByDevice& held) = 0;
  virtual void unlock() = 0;

  // For tests: the process counts as one that cannot be restored.
  virtual void lose() = 0;
};

}  // namespace memsaver::hibernate
