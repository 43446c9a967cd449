// What the saver holds: for its users, and for tests, whether its account is right.

#include <algorithm>
#include <set>
#include <utility>

#include "vmm/saver.hpp"

namespace memsaver {

SaverStatus Saver::status() const {
  check_process();
  SaverStatus status;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::string, TagSnapshot> tags;
  bool released = false;
  bool busy = false;
  std::size_t unprepared = 0;
  for (const auto& [key, arena] : arenas_) {
    TagSnapshot& tag = tags[key.tag];
    tag.tag = key.tag;
    const std::string restore = name_of(key.restore);
    tag.restore = tag.restore.empty() || tag.restore == restore ? restore : "mixed";
    std::size_t away = 0;
    for (const auto& run : arena->released_runs()) away += run.bytes;
    tag.bytes += arena->live_bytes();
    tag.released_bytes += away;
    tag.resident_bytes += arena->live_bytes() - away;
    tag.mapped_by_device[key.device] += arena->mapped_bytes();
    tag.bytes_by_device[key.device] += arena->live_bytes();
    tag.retained_bytes += arena->retained_bytes();
    tag.allocations += arena->allocations().size();
    tag.chunks += arena->chunks().size();
    if (arena->busy()) {
      busy = true;
      tag.state = releasing_ ? "releasing" : "resuming";
      continue;  // the operation is writing to its blocks
    }
    if (away > 0) {
      released = true;
      if (tag.state.empty()) tag.state = "released";
    }
    for (const auto& [address, allocation] : arena->allocations()) {
      for (const auto& block : allocation.blocks) {
        if (block.kept != Kept::nothing) tag.backed_up_bytes += block.content_bytes();
      }
    }
    if (key.restore == Restore::host) unprepared += arena->unprepared_bytes();
  }
  for (auto& [name, tag] : tags) {
    if (tag.state.empty()) tag.state = "resident";
    status.backup_bytes += tag.backed_up_bytes;
    status.tags.push_back(tag);
  }
  std::size_t spare = 0;
  for (const auto& [node, pool] : pools_) {
    const HostPoolStatus each = pool->status();
    status.pool.used_bytes += each.used_bytes;
    status.pool.capacity_bytes += each.capacity_bytes;
    status.pool.target_bytes += each.target_bytes;
    spare += each.capacity_bytes - each.used_bytes;
  }
  status.pool.limit_bytes = settings_.host_backup_limit;
  status.prepared = spare >= unprepared;
  status.file_bytes = files_.used_bytes();
  status.failure = driver_->loss();
  status.state = !status.failure.empty() ? "failed"
                 : busy                  ? (releasing_ ? "releasing" : "resuming")
                 : released              ? "released"
                                         : "resident";
  const auto operation = progress_.operation.load();
  status.operation = operation == Progress::Operation::none      ? ""
                     : operation == Progress::Operation::release ? "release"
                                                                 : "resume";
  status.done_bytes = progress_.done_bytes;
  status.total_bytes = progress_.total_bytes;
  status.copied_bytes = progress_.copied_bytes;
  status.operation_seconds = progress_.seconds();
  return status;
}

std::vector<std::string> Saver::known_tags() const {
  check_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  std::set<std::string> tags;
  for (const auto& [key, arena] : arenas_) tags.insert(key.tag);
  return {tags.begin(), tags.end()};
}

std::vector<int> Saver::devices() const {
  check_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> devices;
  for (const auto& [device, info] : infos_) devices.push_back(device);
  return devices;
}

bool Saver::owns(Address address) const {
  check_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(arenas_.begin(), arenas_.end(), [&](const auto& each) { return each.second->owns(address); });
}

std::vector<std::string> Saver::audit(const std::map<int, std::size_t>& others) {
  std::vector<std::string> problems;
  std::map<int, std::size_t> device_bytes;
  std::size_t host_bytes = 0;
  std::size_t file_bytes = 0;
  std::size_t pool_bytes = 0;
  const std::lock_guard<std::mutex> operation(operation_mutex_);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [device, info] : infos_) device_bytes[device] = 0;
  for (const auto& [key, arena] : arenas_) {
    if (arena->busy()) problems.push_back("tag '" + key.tag + "': an operation never ended");
    RangeSet refused;
    for (const auto& orphan : orphans_) {
      if (orphan.arena != arena.get()) continue;
      for (const auto& range : orphan.withheld) refused.add(range.begin, range.bytes);
    }
    for (auto& problem : arena->audit(refused)) problems.push_back(std::move(problem));
    device_bytes[key.device] += arena->mapped_bytes();
    for (const auto& [address, allocation] : arena->allocations()) {
      for (const auto& block : allocation.blocks) {
        host_bytes += sum_of(block.host);
        file_bytes += block.file.bytes;
      }
    }
  }
  for (const auto& orphan : orphans_) device_bytes[orphan.device] += orphan.bytes;
  for (const auto& [node, pool] : pools_) pool_bytes += pool->status().used_bytes;
  const auto compare = [&](const std::string& what, std::size_t counted, std::size_t expected) {
    if (counted == expected) return;
    problems.push_back(what + ": " + std::to_string(counted) + " bytes are out, and " + std::to_string(expected) +
                       " are accounted for");
  };
  compare("host memory", pool_bytes, host_bytes);
  compare("backup file", files_.used_bytes(), file_bytes);
  for (const auto& [device, bytes] : device_bytes) {
    const MemoryInfo memory = driver_->memory_info(device);
    const auto other = others.find(device);
    compare("device " + std::to_string(device), memory.total_bytes - memory.free_bytes,
            bytes + (other == others.end() ? 0 : other->second));
  }
  return problems;
}

}  // namespace memsaver
