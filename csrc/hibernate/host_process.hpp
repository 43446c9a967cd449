#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hibernate/process.hpp"

namespace memsaver::hibernate {

// A process on the host driver. Each of `accounts` is "DESCRIPTOR:SLOT": an account of a host device, inherited from
// the process, and its slot there. Throws memsaver::Error where one is not.
[[nodiscard]] std::unique_ptr<Process> open_host_process(const std::vector<std::string>& accounts);

}  // namespace memsaver::hibernate
