#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

// What NVML reports of devices, by UUID: also of those that this process cannot see. NVML blocks in a checkpointed
// process.
namespace memsaver::nvml {

struct DeviceMemory {
  std::size_t total_bytes;  // without what the driver reserves
  std::size_t free_bytes;
  std::size_t used_bytes;
  std::size_t process_bytes;  // used by those of `processes` that NVML lists
};

// Returns the memory of a device; nothing if a call fails. One thread at a time.
[[nodiscard]] std::optional<DeviceMemory> memory_of(const std::string& uuid, const std::vector<int>& processes);

// Returns whether NVLink connects two devices, directly or through switches; false if a call fails. NVML is asked once.
[[nodiscard]] bool nvlink_connects(const std::string& one, const std::string& other);

}  // namespace memsaver::nvml
