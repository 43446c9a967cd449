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
  std::size_t process_bytes;  // used by those of `processes` that NVML lists
};

// Returns the memory of a device as NVML reports it; nothing if a call fails. One thread at a time; NVML blocks in a
// checkpointed process.
[[nodiscard]] std::optional<DeviceMemory> memory_of(const std::string& uuid, const std::vector<int>& processes);

}  // namespace memsaver::hibernate
