#include "support/host_memory.hpp"

#include <sys/syscall.h>

#include <limits>
#include <memory>

#include "support/system.hpp"

namespace memsaver {

namespace {

constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

// Reads with the C library, because C++ streams depend on which copy of libstdc++ the process loaded first. A missing
// file sets no limit. A file that cannot be opened for lack of descriptors or memory may set one, so this throws.
template <typename Function>
void each_line(const std::string& path, Function function) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(sys::open_text(path.c_str()), &std::fclose);
  if (file == nullptr) {
    const int code = errno;
    if (code != EMFILE && code != ENFILE && code != ENOMEM) return;
    throw Error::from_errno(ErrorKind::backup, "fopen", code,
                            ", so that the limit of host memory in " + path + " cannot be read")
        .with_advice(code == ENOMEM ? "free host memory, and repeat"
                                    : "raise the limit of open files (ulimit -n) or close some, and repeat");
  }
  char line[4096];
  while (std::fgets(line, sizeof line, file.get()) != nullptr) {
    std::string text(line);
    if (!text.empty() && text.back() == '\n') text.pop_back();
    function(text);
  }
}

// Returns the number with which a text begins; kNoLimit if it begins with none ("max").
std::size_t leading_number(const std::string& text) {
  char* end = nullptr;
  const unsigned long long value = std::strtoull(text.c_str(), &end, 10);
  return end == text.c_str() ? kNoLimit : static_cast<std::size_t>(value);
}

std::size_t number_in(const std::string& path) {
  std::size_t value = kNoLimit;
  each_line(path, [&](const std::string& line) { value = leading_number(line); });
  return value;
}

// Page cache, such as the files of loaded weights: the kernel reclaims it before it refuses memory (see MemAvailable).
std::size_t reclaimable_in(const std::string& path, const std::string& prefix) {
  std::size_t bytes = 0;
  each_line(path, [&](const std::string& line) {
    for (const std::string& key : {prefix + "inactive_file ", prefix + "active_file "}) {
      if (line.compare(0, key.size(), key) == 0) bytes += leading_number(line.substr(key.size()));
    }
  });
  return bytes;
}

// Total and available memory: the least of the machine, this process's control group (v1 or v2) and its parents.
class Memory {
 public:
  std::size_t total = kNoLimit;
  std::size_t available = kNoLimit;

  static Memory now() {
    Memory memory;
    each_line("/proc/meminfo", [&memory](const std::string& line) {
      if (line.compare(0, 9, "MemTotal:") == 0) memory.total = leading_number(line.substr(9)) * 1024;
      if (line.compare(0, 13, "MemAvailable:") == 0) memory.available = leading_number(line.substr(13)) * 1024;
    });
    memory.machine_ = memory.total;
    each_line("/proc/self/cgroup", [&memory](const std::string& line) {
      const auto second = line.rfind(':');
      if (second == std::string::npos) return;
      std::string group = line.substr(second + 1);
      const bool unified = line.compare(0, 3, "0::") == 0;
      if (!unified && line.find(":memory:") == std::string::npos) return;
      for (;;) {
        if (unified) {
          // Beyond memory.high the kernel throttles the group almost to a stop.
          const std::string folder = "/sys/fs/cgroup" + group;
          memory.bound_by(std::min(number_in(folder + "/memory.max"), number_in(folder + "/memory.high")),
                          folder + "/memory.current", folder + "/memory.stat", "");
        } else {
          // The usage includes child groups, as do only the totals among the statistics.
          const std::string folder = "/sys/fs/cgroup/memory" + group;
          memory.bound_by(number_in(folder + "/memory.limit_in_bytes"), folder + "/memory.usage_in_bytes",
                          folder + "/memory.stat", "total_");
        }
        if (group.empty() || group == "/") break;
        group.erase(group.rfind('/'));
      }
    });
    return memory;
  }

 private:
  void bound_by(std::size_t bound, const std::string& usage_file, const std::string& stat_file,
                const std::string& prefix) {
    if (bound >= machine_) return;  // version 1 writes "unlimited" as a large number
    total = std::min(total, bound);
    std::size_t usage = number_in(usage_file);
    if (usage == kNoLimit) return;
    usage -= std::min(usage, reclaimable_in(stat_file, prefix));
    available = std::min(available, usage > bound ? 0 : bound - usage);
  }

  std::size_t machine_ = kNoLimit;
};

}  // namespace

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void prefer_node(void* memory, std::size_t bytes, int numa_node) noexcept {
  if (numa_node < 0 || numa_node >= 64) return;
  constexpr int kPreferred = 1;  // MPOL_PREFERRED
  const unsigned long nodes = 1ul << numa_node;
  syscall(SYS_mbind, memory, bytes, kPreferred, &nodes, 64, 0);
}

std::size_t machine_memory_bytes() { return Memory::now().total; }

std::size_t available_memory_bytes(std::size_t wanted) {
  try {
    return Memory::now().available;
  } catch (Error& error) {
    throw error.with_bytes(wanted);
  }
}

}  // namespace memsaver
