#pragma once

#include <string>

namespace memsaver {

// Writes one line to standard error: a failure that cannot be thrown, such as that of an undo step.
void warn(const std::string& message) noexcept;

}  // namespace memsaver
