#pragma once

#include "backup/backup_store.hpp"

namespace memsaver {

// Restore policy: what a resume must restore of the content of released memory.
enum class Restore {
  discard,  // nothing: the content is undefined
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

struct Settings : BackupSettings {
  bool peer_access = false;  // let every visible device reach the memory
};

}  // namespace memsaver
