#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace memsaver::hibernate {

// Device memory as NVML reports it, from a process that is not checkpointed.
class Nvml {
 public:
  struct Memory {
    std::size_t total_bytes;
    std::size_t free_bytes;
    std::size_t used_bytes;
    std::size_t process_bytes;  // of those processes that NVML lists
  };

  // Nothing if NVML cannot be used or does not know the device.
  [[nodiscard]] std::optional<Memory> memory_of(const std::string& uuid, const std::vector<int>& processes);

 private:
  // Layouts of the versioned functions below, which NVML keeps stable.
  struct DeviceMemory {
    unsigned version;
    unsigned long long total, reserved, free, used;
  };
  struct RunningProcess {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
  };
  static constexpr unsigned kProcesses = 256;

  bool load();

  int (*handle_by_uuid_)(const char*, void**) = nullptr;
  int (*memory_)(void*, DeviceMemory*) = nullptr;
  int (*processes_)(void*, unsigned*, RunningProcess*) = nullptr;
  RunningProcess list_[kProcesses] = {};
};

}  // namespace memsaver::hibernate
