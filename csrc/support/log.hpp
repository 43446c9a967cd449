#pragma once

#include <string>

namespace memsaver {

// One line on standard error, for what cannot be thrown: a failing undo step, a failing free.
void warn(const std::string& message) noexcept;

}  // namespace memsaver
