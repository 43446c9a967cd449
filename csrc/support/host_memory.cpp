#include "support/host_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>

namespace memsaver {

namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

// Line by line with the C library: C++ streams depend on which of the libstdc++ that other packages of the process
// bring along is loaded first.
template <typename Function>
void each_line(const std::string& path, Function function) {
  std::FILE* const file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return;
  char line[4096];
  while (std::fgets(line, sizeof line, file) != nullptr) {
    std::string text(line);
    if (!text.empty() && text.back() == '\n') text.pop_back();
    function(text);
  }
  std::fclose(file);
}

// The number that a text begins with; kNoLimit where it begins with none ("max").
std::size_t leading_number(const std::string& text) {
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 10);
  return end == text.c_str() ? kNoLimit : static_cast<std::size_t>(value);
}

std::size_t meminfo_bytes(const std::string& key) {
  std::size_t bytes = kNoLimit;
  each_line("/proc/meminfo", [&](const std::string& line) {
    if (line.compare(0, key.size() + 1, key + ":") == 0) bytes = leading_number(line.substr(key.size() + 1)) * 1024;
  });
  return bytes;
}

std::size_t number_in(const std::string& path) {
  std::size_t value = kNoLimit;
  each_line(path, [&](const std::string& line) { value = leading_number(line); });
  return value;
}

// Page cache that the kernel gives up before it refuses memory.
std::size_t reclaimable_in(const std::string& path) {
  std::size_t bytes = 0;
  const std::string key = "inactive_file ";
  each_line(path, [&](const std::string& line) {
    if (line.compare(0, key.size(), key) == 0) bytes = leading_number(line.substr(key.size()));
  });
  return bytes;
}

// The tightest (limit - usage) and limit over this process's control group and its parents, version 2 and 1.
struct GroupMemory {
  std::size_t limit = kNoLimit;
  std::size_t available = kNoLimit;

  void add(const std::string& folder, const char* limit_file, const char* usage_file) {
    const std::size_t bound = number_in(folder + limit_file);
    if (bound == kNoLimit) return;
    std::size_t usage = number_in(folder + usage_file);
    if (usage == kNoLimit) return;
    usage -= std::min(usage, reclaimable_in(folder + "/memory.stat"));
    limit = std::min(limit, bound);
    available = std::min(available, usage > bound ? 0 : bound - usage);
  }
};

GroupMemory group_memory() {
  GroupMemory memory;
  each_line("/proc/self/cgroup", [&memory](const std::string& line) {
    const auto second = line.rfind(':');
    if (second == std::string::npos) return;
    std::string group = line.substr(second + 1);
    const bool unified = line.compare(0, 3, "0::") == 0;
    if (!unified && line.find(":memory:") == std::string::npos) return;
    for (;;) {
      if (unified) {
        memory.add("/sys/fs/cgroup" + group, "/memory.max", "/memory.current");
      } else {
        memory.add("/sys/fs/cgroup/memory" + group, "/memory.limit_in_bytes", "/memory.usage_in_bytes");
      }
      if (group.empty() || group == "/") break;
      group.erase(group.rfind('/'));
    }
  });
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
