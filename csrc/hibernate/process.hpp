#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace memsaver::hibernate {

// Bytes by device name.
using ByDevice = std::map<std::string, std::size_t>;

// A failed step: the driver's names of the call and the error; if memory is short, the device and how much is needed
// and free. No name contains a blank.
struct StepError : std::runtime_error {
  StepError(const std::string& failed_call, const std::string& error_code, std::string on_device = "",
            std::size_t needed = 0, std::size_t free = 0)
      : std::runtime_error(failed_call + " failed: " + error_code),
        call(failed_call),
        code(error_code),
        device(std::move(on_device)),
        needed_bytes(needed),
        free_bytes(free) {}

  const std::string call, code, device;
  const std::size_t needed_bytes, free_bytes;
};

// Another process, whose device state the driver can checkpoint: running -> locked -> checkpointed and back. Owns
// nothing of it. One thread at a time. Each step throws StepError: it may have had an effect all the same; see state().
class Process {
 public:
  virtual ~Process() = default;

  // Returns what the driver reports: running, locked, checkpointed, failed (it cannot be restored), or unknown. Throws
  // nothing on the CUDA driver, configuration on the host driver.
  [[nodiscard]] virtual const char* state() = 0;

  // Blocks device calls of the process; those in flight have `timeout_ms` milliseconds to end.
  virtual void lock(unsigned timeout_ms) = 0;
  // Releases all device memory of the process. Returns the bytes that it held of `devices`, as far as they are known.
  virtual ByDevice checkpoint(const std::vector<std::string>& devices) = 0;
  // Takes the memory again. Throws StepError, and does not call the driver, if less than checkpoint()'s `held` is free.
  virtual void restore(const ByDevice& held) = 0;
  virtual void unlock() = 0;
};

// Returns a process on the CUDA driver. Throws StepError if this driver cannot checkpoint.
[[nodiscard]] std::unique_ptr<Process> open_cuda_process(int pid);

// Returns a process on the host driver. Each of `accounts` is "DESCRIPTOR:SLOT": a HostAccount inherited from the
// process, and its slot in it. Throws configuration if one is invalid.
[[nodiscard]] std::unique_ptr<Process> open_host_process(const std::vector<std::string>& accounts);

}  // namespace memsaver::hibernate
