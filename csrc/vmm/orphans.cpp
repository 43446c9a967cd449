#include "vmm/orphans.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "support/error.hpp"
#include "support/log.hpp"

namespace memsaver {

void Orphans::give_back(MemoryMap& map, Orphan orphan) noexcept {
  if (!try_give_back(map, orphan)) add(std::move(orphan));
}

bool Orphans::try_give_back(MemoryMap& map, Orphan& orphan) noexcept {
  try {
    if (orphan.mapped_at != 0) {
      driver_.unmap(orphan.device, orphan.mapped_at, orphan.bytes);
      orphan.mapped_at = 0;
      const Lock map_lock(map.mutex);
      const Lock lock(mutex_);
      if (const auto entry = find(orphan); entry != list_.end()) {
        entry->mapped_at = 0;
        for (const auto& range : std::exchange(entry->withheld, {})) entry->arena->reclaim(range.begin, range.bytes);
      }
    }
    driver_.release(orphan.device, orphan.handle, orphan.bytes);
  } catch (const Error& error) {
    warn(std::string("device memory was not given back, the next operation tries again: ") + error.what());
    return false;
  }
  return true;
}

void Orphans::add(Orphan orphan) {
  const Lock lock(mutex_);
  list_.push_back(std::move(orphan));
}

std::vector<Orphans::Orphan>::iterator Orphans::find(const Orphan& orphan) {
  return std::find_if(list_.begin(), list_.end(),
                      [&](const Orphan& each) { return each.device == orphan.device && each.handle == orphan.handle; });
}

void Orphans::retry(MemoryMap& map) {
  const Lock one_at_a_time(retry_mutex_);
  retry_each(map);
}

void Orphans::retry_unless_busy(MemoryMap& map) {
  if (!retry_mutex_.try_lock()) return;
  const Lock one_at_a_time(retry_mutex_, std::adopt_lock);
  retry_each(map);
}

void Orphans::retry_each(MemoryMap& map) {
  for (auto& orphan : list()) {
    if (!try_give_back(map, orphan)) continue;
    const Lock lock(mutex_);
    list_.erase(find(orphan));
  }
}

void Orphans::check_none_mapped(const MemoryMap&, const Arena& arena) const {
  const Lock lock(mutex_);
  for (const auto& orphan : list_) {
    if (orphan.mapped_at == 0 || !arena.owns(orphan.mapped_at)) continue;
    throw Error::from_driver(ErrorKind::driver, "unmap", "REFUSED", "an earlier failure left a range mapped")
        .with_tag(arena.key().tag)
        .with_device(orphan.device)
        .with_bytes(orphan.bytes)
        .with_address(orphan.mapped_at);
  }
}

void Orphans::withhold(const MemoryMap&, Arena& arena, Address address, std::size_t bytes) {
  const Lock lock(mutex_);
  for (auto& orphan : list_) {
    if (orphan.mapped_at == 0) continue;
    const Address from = std::max(address, orphan.mapped_at);
    const Address to = std::min(address + bytes, orphan.mapped_at + orphan.bytes);
    if (from >= to) continue;
    arena.withhold(from, to - from);
    orphan.arena = &arena;
    orphan.withheld.push_back({from, to - from});
  }
}

std::vector<Orphans::Orphan> Orphans::list() const {
  const Lock lock(mutex_);
  return list_;
}

}  // namespace memsaver
