#pragma once

#include "vmm/arena.hpp"
#include "vmm/reports.hpp"

namespace memsaver {

// Owns the arenas of all devices, tags and restore policies. Calls no driver.
class MemoryMap {
 public:
  using Tags = std::vector<std::string>;  // empty: all

  // Guards the map and every arena in it. Never held across a call to a device, a copy, a file operation or a wait, so
  // that allocations and status do not wait for an operation.
  mutable Mutex mutex ACQUIRED_AFTER(BackupStore::operation_mutex);

  [[nodiscard]] bool knows(int device) const EXCLUDES(mutex) {
    const Lock lock(mutex);
    return infos_.find(device) != infos_.end();
  }
  void add_device(int device, const DeviceInfo& info) EXCLUDES(mutex) {
    const Lock lock(mutex);
    infos_.emplace(device, info);
  }
  // Returns what was added for a device; it stays valid and unchanged as long as the map.
  [[nodiscard]] const DeviceInfo& info_of(int device) const REQUIRES(mutex) { return infos_.at(device); }

  // Returns the arena, made if there is none. An arena lives as long as the map.
  [[nodiscard]] Arena& arena_for(const Arena::Key& key) REQUIRES(mutex) {
    auto& arena = arenas_[key];
    if (!arena) arena = std::make_unique<Arena>(key);
    return *arena;
  }
  // Returns the arena whose addresses include this one, or null.
  [[nodiscard]] Arena* arena_of(Address address) const REQUIRES(mutex) {
    for (const auto& [key, arena] : arenas_) {
      if (arena->owns(address)) return arena.get();
    }
    return nullptr;
  }
  [[nodiscard]] std::vector<Arena*> select(const Tags& tags) const REQUIRES(mutex) {
    std::vector<Arena*> selected;
    for (const auto& [key, arena] : arenas_) {
      if (tags.empty() || std::find(tags.begin(), tags.end(), key.tag) != tags.end()) selected.push_back(arena.get());
    }
    return selected;
  }
  // Sets the operation that busy arenas are in.
  void set_operation(Progress::Operation kind) REQUIRES(mutex) { operation_ = kind; }

  // Fills in the tags, their bytes, and the state.
  void describe(SaverStatus& status) const REQUIRES(mutex) {
    std::map<std::string, TagSnapshot> tags;
    for (const auto& [key, arena] : arenas_) describe(*arena, tags[key.tag]);
    status.state = "resident";
    for (auto& [name, tag] : tags) {
      if (tag.state.empty()) tag.state = "resident";
      // A busy tag determines the state, else a released one.
      if (tag.state != "resident" && (status.state == "resident" || tag.state != "released")) status.state = tag.state;
      status.backup_bytes += tag.kept_bytes;
      status.tags.push_back(std::move(tag));
    }
  }
  // Returns the sum of Arena::unprepared_bytes() of the idle arenas that are kept in host memory.
  [[nodiscard]] std::size_t unprepared_bytes() const REQUIRES(mutex) {
    std::size_t sum = 0;
    for (const auto& [key, arena] : arenas_) {
      if (key.restore == Restore::host && !arena->busy()) sum += arena->unprepared_bytes();
    }
    return sum;
  }
  [[nodiscard]] std::vector<int> devices() const EXCLUDES(mutex) {
    const Lock lock(mutex);
    std::vector<int> devices;
    for (const auto& [device, info] : infos_) devices.push_back(device);
    return devices;
  }

 private:
  void describe(const Arena& arena, TagSnapshot& tag) const REQUIRES(mutex) {
    const auto& key = arena.key();
    const std::string restore = name_of(key.restore);
    tag.tag = key.tag;
    // The policy of a region whose memory is all freed does not count, unless the tag has no other region.
    if (tag.bytes == 0) tag.restore = restore;
    if (arena.live_bytes() > 0 && tag.restore != restore) tag.restore = "mixed";
    const std::size_t released = arena.released().total_bytes();
    const std::size_t shrunk = arena.shrunk().total_bytes();
    tag.bytes += arena.live_bytes();
    tag.released_bytes += released;
    tag.shrunk_bytes += shrunk;
    tag.resident_bytes += arena.live_bytes() - released - shrunk;
    tag.shrunk_by_device[key.device] += shrunk;
    tag.mapped_by_device[key.device] += arena.mapped_bytes();
    tag.bytes_by_device[key.device] += arena.live_bytes();
    tag.retained_bytes += arena.retained_bytes();
    tag.allocations += arena.allocations().size();
    tag.chunks += arena.chunks().size();
    if (arena.busy()) {
      if (operation_ != Progress::Operation::none) {
        tag.state = operation_ == Progress::Operation::release ? "releasing" : "resuming";
      }
      return;  // the operation is writing to its blocks
    }
    if (released > 0 && tag.state.empty()) tag.state = "released";
    tag.expected_bytes += arena.expected_bytes(false);
    tag.expected_file_bytes += arena.expected_bytes(true);
    for (const auto& [address, allocation] : arena.allocations()) {
      for (const auto& block : allocation.blocks) {
        if (block.kept != Kept::nothing) tag.backed_up_bytes += block.content_bytes();
        tag.kept_bytes += block.kept_bytes();
      }
    }
  }

  std::map<Arena::Key, std::unique_ptr<Arena>> arenas_ GUARDED_BY(mutex);
  std::map<int, DeviceInfo> infos_ GUARDED_BY(mutex);
  Progress::Operation operation_ GUARDED_BY(mutex) = Progress::Operation::none;
};

// Returns the names, separated by commas, for messages.
[[nodiscard]] inline std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace memsaver
