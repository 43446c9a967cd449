#include "support/log.hpp"

#include <cstdio>

namespace memsaver {

void warn(const std::string& message) noexcept { std::fprintf(stderr, "memsaver: warning: %s\n", message.c_str()); }

}  // namespace memsaver
