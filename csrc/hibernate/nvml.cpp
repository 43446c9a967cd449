#include "hibernate/nvml.hpp"

#include <dlfcn.h>

#include <algorithm>

namespace memsaver::hibernate {

std::optional<Nvml::Memory> Nvml::memory_of(const std::string& uuid, const std::vector<int>& processes) {
  void* device = nullptr;
  if (!load() || handle_by_uuid_(uuid.c_str(), &device) != 0) return std::nullopt;
  DeviceMemory memory{sizeof(DeviceMemory) | 2u << 24, 0, 0, 0, 0};
  if (memory_(device, &memory) != 0) return std::nullopt;
  unsigned count = kProcesses;
  std::size_t own = 0;
  if (processes_(device, &count, list_) == 0) {
    for (unsigned i = 0; i < count; ++i) {
      const bool asked = std::count(processes.begin(), processes.end(), static_cast<int>(list_[i].pid)) != 0;
      if (asked && list_[i].used != ~0ull) own += list_[i].used;
    }
  }
  return Memory{memory.total, memory.free, memory.used, own};
}

bool Nvml::load() {
  if (processes_ != nullptr) return true;
  void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return false;
  const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
  handle_by_uuid_ = reinterpret_cast<int (*)(const char*, void**)>(dlsym(library, "nvmlDeviceGetHandleByUUID"));
  memory_ = reinterpret_cast<int (*)(void*, DeviceMemory*)>(dlsym(library, "nvmlDeviceGetMemoryInfo_v2"));
  const auto processes = reinterpret_cast<int (*)(void*, unsigned*, RunningProcess*)>(
      dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3"));
  if (init == nullptr || handle_by_uuid_ == nullptr || memory_ == nullptr || processes == nullptr || init() != 0) {
    return false;
  }
  processes_ = processes;
  return true;
}

}  // namespace memsaver::hibernate
