#pragma once

#include <string>

namespace memsaver {

// Writes one line to standard error, for failures that cannot be thrown: of an undo step, of a free.
void warn(const std::string& message) noexcept;

}  // namespace memsaver
