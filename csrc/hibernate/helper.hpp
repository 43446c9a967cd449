#pragma once

#include <functional>

#include "hibernate/process.hpp"

namespace memsaver::hibernate {

// Returns an adaptor around the process to checkpoint; a test build injects faults this way.
using ProcessAdaptor = std::function<std::unique_ptr<Process>(std::unique_ptr<Process>)>;

// Runs the program, which checkpoints its parent: the CUDA driver checkpoints a process only on behalf of another one.
// Returns the exit code.
//
// Standard input and output are one end of a socket pair. Arguments: the parent's process id; its driver, "cuda" or
// "host"; for "host" an account per device (open_host_process()). Each request is a line, answered by a line:
//
//     lock <timeout, ms>                   -> ok <s>         blocks the parent's device calls
//     checkpoint [<device>...]             -> ok <s> [<device> <bytes held>...]       gives back all its device memory
//     restore [<device> <bytes held>...]   -> ok <s>                                  takes it again
//     unlock                               -> ok <s>                                  lets its device calls go on
//     state                                -> ok <running | locked | checkpointed | failed>
//     memory <uuid> [<process id>...]      -> ok <total> <used> <used by these processes>: bytes of a device, as
//                                             nvidia-smi shows them; in a checkpointed process NVML itself blocks
//
// or "error <call> <code> <state of the process now>", followed by " <device> <needed> <free>" if memory is short. A
// step that the process has already taken does nothing. The program holds no device memory, and ends when the socket is
// closed or its parent dies. (PR_SET_PDEATHSIG is tied to the thread that started the program.)
[[nodiscard]] int run_helper(const std::vector<std::string>& arguments, const ProcessAdaptor& adapt = {});

}  // namespace memsaver::hibernate
