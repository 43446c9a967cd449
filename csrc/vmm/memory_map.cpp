#include "vmm/memory_map.hpp"

#include <algorithm>
#include <utility>

namespace memsaver {

bool MemoryMap::knows(int device) const {
  const Lock lock(mutex);
  return infos_.find(device) != infos_.end();
}

void MemoryMap::add_device(int device, const DeviceInfo& info) {
  const Lock lock(mutex);
  infos_.emplace(device, info);
}

Arena& MemoryMap::arena_for(const Arena::Key& key) {
  auto& arena = arenas_[key];
  if (!arena) arena = std::make_unique<Arena>(key);
  return *arena;
}

Arena* MemoryMap::arena_of(Address address) const {
  for (const auto& [key, arena] : arenas_) {
    if (arena->owns(address)) return arena.get();
  }
  return nullptr;
}

std::vector<Arena*> MemoryMap::select(const Tags& tags) const {
  std::vector<Arena*> selected;
  for (const auto& [key, arena] : arenas_) {
    if (tags.empty() || std::find(tags.begin(), tags.end(), key.tag) != tags.end()) selected.push_back(arena.get());
  }
  return selected;
}

void MemoryMap::describe(const Arena& arena, TagSnapshot& tag) const {
  const auto& key = arena.key();
  const std::string restore = name_of(key.restore);
  tag.tag = key.tag;
  // The policy of a region whose memory is all freed does not count, unless the tag has no other region.
  if (tag.bytes == 0) tag.restore = restore;
  if (arena.live_bytes() > 0 && tag.restore != restore) tag.restore = "mixed";
  const std::size_t released = arena.released().total_bytes();
  tag.bytes += arena.live_bytes();
  tag.released_bytes += released;
  tag.resident_bytes += arena.live_bytes() - released;
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

void MemoryMap::describe(SaverStatus& status) const {
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

std::size_t MemoryMap::unprepared_bytes() const {
  std::size_t sum = 0;
  for (const auto& [key, arena] : arenas_) {
    if (key.restore == Restore::host && !arena->busy()) sum += arena->unprepared_bytes();
  }
  return sum;
}

std::vector<int> MemoryMap::devices() const {
  const Lock lock(mutex);
  std::vector<int> devices;
  for (const auto& [device, info] : infos_) devices.push_back(device);
  return devices;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace memsaver
