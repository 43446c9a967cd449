#pragma once

#include <memory>

#include "driver/driver.hpp"

namespace memsaver {

// NVIDIA GPUs through libcuda's virtual memory management, in the primary context of each device, which torch uses
// too. A device's context is made at the first call that needs it.
[[nodiscard]] std::unique_ptr<Driver> open_cuda_driver();

}  // namespace memsaver
