#pragma once

#include <memory>
#include <string>

#include "driver/driver.hpp"

namespace memsaver {

// Returns a driver of NVIDIA GPUs, by libcuda's virtual memory management in the primary context of each device, as
// torch uses it. A context is created at the first call that needs it. Throws configuration if CUDA is not available.
[[nodiscard]] std::unique_ptr<Driver> open_cuda_driver();

// Returns whether libcuda finds a device; if not, `why` says what is missing.
[[nodiscard]] bool cuda_available(std::string* why) noexcept;

// Returns whether the NVIDIA driver can checkpoint processes.
[[nodiscard]] bool cuda_can_checkpoint() noexcept;

// Returns whether kernels of `device` can access memory of another device at `address`, because peer access is on;
// false if `device` has no context or the address is unknown.
[[nodiscard]] bool cuda_reaches(int device, Address address) noexcept;

}  // namespace memsaver
