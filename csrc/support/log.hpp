#pragma once

#include <cstdio>
#include <string>

namespace memsaver {

// Writes one line to standard error: a failure that cannot be thrown, such as that of an undo step.
inline void warn(const std::string& message) noexcept {
  std::fprintf(stderr, "memsaver: warning: %s\n", message.c_str());
}

}  // namespace memsaver
