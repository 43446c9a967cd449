#pragma once

#include <memory>

#include "hibernate/nvml.hpp"
#include "hibernate/process.hpp"

namespace memsaver::hibernate {

// A process on the CUDA driver. Throws StepError if this driver cannot checkpoint.
[[nodiscard]] std::unique_ptr<Process> open_cuda_process(int pid, Nvml& nvml);

}  // namespace memsaver::hibernate
