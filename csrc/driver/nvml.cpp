#include "driver/nvml.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <type_traits>

#include "support/mutex.hpp"

namespace memsaver::nvml {

namespace {

// Layouts of the versioned functions below, which NVML keeps stable.
struct Memory {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct RunningProcess {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
};
constexpr unsigned kProcesses = 256;
constexpr int kNvLink = 2;  // NVML_P2P_CAPS_INDEX_NVLINK

int (*handle_by_uuid)(const char*, void**) = nullptr;
int (*memory_info)(void*, Memory*) = nullptr;
int (*running_processes)(void*, unsigned*, RunningProcess*) = nullptr;
int (*p2p_status)(void*, void*, int, int*) = nullptr;

bool load() {
  static Mutex mutex;
  static bool loaded = false;
  const Lock lock(mutex);
  if (loaded) return true;
  void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return false;
  int (*init)() = nullptr;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  loaded = find(init, "nvmlInit_v2") && find(handle_by_uuid, "nvmlDeviceGetHandleByUUID") &&
           find(memory_info, "nvmlDeviceGetMemoryInfo_v2") &&
           find(running_processes, "nvmlDeviceGetComputeRunningProcesses_v3") &&
           find(p2p_status, "nvmlDeviceGetP2PStatus") && init() == 0;
  return loaded;
}

}  // namespace

std::optional<DeviceMemory> memory_of(const std::string& uuid, const std::vector<int>& processes) {
  void* device = nullptr;
  if (!load() || handle_by_uuid(uuid.c_str(), &device) != 0) return std::nullopt;
  Memory memory{sizeof(Memory) | 2u << 24, 0, 0, 0, 0};
  if (memory_info(device, &memory) != 0) return std::nullopt;
  static RunningProcess list[kProcesses];
  unsigned count = kProcesses;
  std::size_t own = 0;
  if (running_processes(device, &count, list) == 0) {
    for (unsigned i = 0; i < count; ++i) {
      const bool asked = std::count(processes.begin(), processes.end(), static_cast<int>(list[i].pid)) != 0;
      if (asked && list[i].used != ~0ull) own += list[i].used;
    }
  }
  return DeviceMemory{memory.total - memory.reserved, memory.free, memory.used, own};
}

bool nvlink_connects(const std::string& one, const std::string& other) {
  static Mutex mutex;
  static auto& known = *new std::map<std::pair<std::string, std::string>, bool>;
  const Lock lock(mutex);
  const auto [found, is_new] = known.try_emplace({one, other}, false);
  if (is_new) {
    void* devices[2] = {};
    int status = -1;  // 0: NVML_P2P_STATUS_OK
    found->second = load() && handle_by_uuid(one.c_str(), &devices[0]) == 0 &&
                    handle_by_uuid(other.c_str(), &devices[1]) == 0 &&
                    p2p_status(devices[0], devices[1], kNvLink, &status) == 0 && status == 0;
  }
  return found->second;
}

}  // namespace memsaver::nvml
