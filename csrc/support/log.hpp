#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <string>

namespace memsaver {

// Writes one line to standard error: a failure that cannot be thrown, such as that of an undo step.
inline void warn(const std::string& message) noexcept {
  std::fprintf(stderr, "memsaver: warning: %s\n", message.c_str());
}

// Makes a call whose failure is only logged, after `what`. Returns whether it succeeded.
inline bool attempt(const char* what, const std::function<void()>& call) {
  try {
    call();
    return true;
  } catch (const std::exception& error) {
    warn(std::string(what) + ": " + error.what());
    return false;
  }
}

}  // namespace memsaver
