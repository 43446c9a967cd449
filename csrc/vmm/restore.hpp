#pragma once

namespace memsaver {

// Restore policy: what a resume owes to the content of released memory.
enum class Restore {
  discard,  // nothing: content is undefined
  zero,     // zeros
  host,     // the content, from host memory
  file,     // the content, from a file
};

[[nodiscard]] constexpr const char* name_of(Restore restore) noexcept {
  constexpr const char* names[] = {"discard", "zero", "host", "file"};
  return names[static_cast<int>(restore)];
}
[[nodiscard]] constexpr bool keeps_content(Restore restore) {
  return restore == Restore::host || restore == Restore::file;
}

}  // namespace memsaver
