#pragma once

#include <cstddef>
#include <string>

#include "backup/backup_store.hpp"

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

struct Settings {
  std::size_t host_backup_limit = 0;  // bytes; 0: 80 % of the memory that is available when the saver is made
  std::string file_folder = "/tmp";
  Retention retention = Retention::keep;
  VerifyChoice verify = VerifyChoice::automatic;
  bool pack = true;            // keep content packed where that saves an eighth
  std::string shared_backups;  // the name of a store of host memory that other processes use, too; empty: none
  bool peer_access = false;    // let every visible device reach the memory
};

}  // namespace memsaver
