#pragma once

#include <memory>
#include <string>

#include "driver/driver.hpp"

namespace memsaver {

// NVIDIA GPUs through libcuda's virtual memory management, in the primary context of each device, as torch. A context
// is created at the first call that needs it.
[[nodiscard]] std::unique_ptr<Driver> open_cuda_driver();

// True if libcuda finds a device; if not, `why` says what is missing.
[[nodiscard]] bool cuda_available(std::string* why) noexcept;

// True if the NVIDIA driver can checkpoint processes.
[[nodiscard]] bool cuda_can_checkpoint() noexcept;

// True if kernels of `device` can access memory of another device at `address`: peer access is on. `device` must have
// a context. False if that cannot be determined.
[[nodiscard]] bool cuda_reaches(int device, Address address) noexcept;

}  // namespace memsaver
