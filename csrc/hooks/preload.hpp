#pragma once

#include <string>

#include "vmm/arena.hpp"

namespace memsaver {

// What a resume owes to memory that an application allocates past torch, by what it says of it. Memory without a
// backup is undefined after a resume, except under the tags whose undefined content has broken engines.
[[nodiscard]] Restore restore_for(const std::string& tag, bool cpu_backup, bool disk_backup);

// Makes the preload library of this process send its allocations to the active saver. Returns the library's path, or
// an empty string where none is loaded.
// Throws ErrorKind::configuration where it is another version's.
[[nodiscard]] std::string attach_preload_library();

}  // namespace memsaver
