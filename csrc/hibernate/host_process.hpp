#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hibernate/process.hpp"

namespace memsaver::hibernate {

// A process on the host driver. Each of `accounts` is "DESCRIPTOR:SLOT": a HostAccount inherited from the process, and
// its slot in it. Throws memsaver::Error if one is invalid.
[[nodiscard]] std::unique_ptr<Process> open_host_process(const std::vector<std::string>& accounts);

}  // namespace memsaver::hibernate
