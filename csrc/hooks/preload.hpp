#pragma once

#include <string>

#include "vmm/arena.hpp"

namespace memsaver {

// The restore policy of memory that an application allocates without torch. Without a backup its content is undefined
// after a resume, except under tags for which undefined content has broken engines.
[[nodiscard]] Restore restore_for(const std::string& tag, bool cpu_backup, bool disk_backup);

// Connects the preload library of this process to the active saver. Returns the library's path, or an empty string if
// none is loaded. Throws ErrorKind::configuration if it belongs to another version.
[[nodiscard]] std::string attach_preload_library();

}  // namespace memsaver
