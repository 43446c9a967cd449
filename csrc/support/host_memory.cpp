#include "support/host_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace memsaver {

namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

std::size_t meminfo_bytes(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  std::string name;
  std::size_t kib = 0;
  std::string unit;
  while (file >> name >> kib) {
    std::getline(file, unit);
    if (name == key + ":") return kib * 1024;
  }
  return kNoLimit;
}

std::size_t number_in(const std::string& path) {
  std::ifstream file(path);
  std::size_t value = 0;
  return file >> value ? value : kNoLimit;  // "max" is no number: no limit
}

// The tightest (limit - usage) and limit over this process's control group and its parents, version 2 and 1.
struct GroupMemory {
  std::size_t limit = kNoLimit;
  std::size_t available = kNoLimit;

  void add(const std::string& folder, const char* limit_file, const char* usage_file) {
    const std::size_t bound = number_in(folder + limit_file);
    if (bound == kNoLimit) return;
    const std::size_t usage = number_in(folder + usage_file);
    limit = std::min(limit, bound);
    available = std::min(available, usage == kNoLimit || usage > bound ? 0 : bound - usage);
  }
};

GroupMemory group_memory() {
  GroupMemory memory;
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {
    const auto second = line.rfind(':');
    if (second == std::string::npos) continue;
    std::string group = line.substr(second + 1);
    const bool unified = line.compare(0, 3, "0::") == 0;
    if (!unified && line.find(":memory:") == std::string::npos) continue;
    for (;;) {
      if (unified) {
        memory.add("/sys/fs/cgroup" + group, "/memory.max", "/memory.current");
      } else {
        memory.add("/sys/fs/cgroup/memory" + group, "/memory.limit_in_bytes", "/memory.usage_in_bytes");
      }
      if (group.empty() || group == "/") break;
      group.erase(group.rfind('/'));
    }
  }
  return memory;
}

}  // namespace

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

std::size_t machine_memory_bytes() { return std::min(meminfo_bytes("MemTotal"), group_memory().limit); }

std::size_t available_memory_bytes() { return std::min(meminfo_bytes("MemAvailable"), group_memory().available); }

}  // namespace memsaver
