#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace memsaver::hibernate {

struct DeviceMemory {
  std::size_t total_bytes;
  std::size_t free_bytes;
  std::size_t used_bytes;
  std::size_t process_bytes;  // of those processes that NVML lists
};

// Returns device memory by NVML, for processes that are not checkpointed; nothing if it fails. One thread at a time.
[[nodiscard]] std::optional<DeviceMemory> memory_of(const std::string& uuid, const std::vector<int>& processes);

}  // namespace memsaver::hibernate
