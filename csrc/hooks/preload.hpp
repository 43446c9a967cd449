#pragma once

#include "vmm/settings.hpp"

namespace memsaver {

// Any thread may call these functions.

// Returns the policy of a region of the compatibility API. Without a backup: zero for zeroed tags, else discard.
[[nodiscard]] Restore restore_for(const std::string& tag, bool cpu_backup, bool disk_backup);

// Sets the zeroed tags, whose memory comes back as zeros, and lets the preload library of this process send its
// allocations to the active saver. To be called once. Returns the library's path, or an empty string if none is loaded.
// Throws configuration if the library is of another version: it sends nothing.
[[nodiscard]] std::string attach_preload_library(std::set<std::string> zeroed_tags);

}  // namespace memsaver
