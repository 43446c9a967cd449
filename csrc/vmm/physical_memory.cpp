#include "vmm/physical_memory.hpp"

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "support/log.hpp"
#include "support/sizes.hpp"

namespace memsaver {

namespace {

// Makes a call whose failure is only logged, after `what`. Returns whether it succeeded.
bool attempt(const char* what, const std::function<void()>& call) {
  try {
    call();
    return true;
  } catch (const std::exception& error) {
    warn(std::string(what) + ": " + error.what());
    return false;
  }
}

}  // namespace

void add_free_memory(Error& error, Driver& driver, int device, std::size_t bytes) {
  if (error.kind != ErrorKind::out_of_device_memory || error.needed_bytes != 0) return;
  try {
    error.with_memory(bytes, driver.memory_info(device).free_bytes);
  } catch (const Error&) {
    // The first error is the one to report.
  }
}

PhysicalMemory::~PhysicalMemory() {
  if (getpid() != process_) return;
  constexpr char what[] = "while giving addresses back";
  give_back_reserved();
  retry(true);
  for (const Arena* const arena : map_.select({})) {
    const int device = arena->key().device;
    bool clear = attempt(what, [&] {
      const Lock lock(map_.mutex);
      check_none_mapped(map_, *arena);
    });
    for (const auto& [address, chunk] : arena->chunks()) {
      Orphan orphan{device, chunk.handle, chunk.bytes, chunk.address};
      (void)try_give_back(orphan);
      clear = clear && orphan.mapped_at == 0;
    }
    if (!clear) continue;
    const std::size_t guard = map_.info_of(device).granularity;
    for (const auto& span : arena->spans()) {
      attempt(what, [&] { driver_.unreserve(device, span.first, span.second + guard); });
    }
  }
}

std::vector<int> PhysicalMemory::peers_of(int device) {
  std::vector<int> peers;
  if (!peer_access_) return peers;
  for (int peer = 0; peer < driver_.device_count(); ++peer) {
    if (peer != device) peers.push_back(peer);
  }
  return peers;
}

void PhysicalMemory::add_addresses(Arena& arena, std::size_t bytes, const DeviceInfo& info) {
  // As large as the device: released allocations keep their addresses, so more may be needed later. The unused end
  // keeps neighbouring spans apart: nothing may lie in two reservations.
  const std::size_t span = round_up(std::max(bytes, info.total_bytes), info.granularity);
  const Address address = driver_.reserve(arena.key().device, span + info.granularity);
  const Lock lock(map_.mutex);
  arena.add_span(address, span);
}

Chunk PhysicalMemory::acquire(const Arena::Key& key, Address address, std::size_t bytes, Cleanup& undo,
                              std::optional<Handle> reserved) {
  const int device = key.device;
  try {
    const Handle handle = reserved ? *reserved : driver_.create(device, bytes);
    const auto mapped_at = std::make_shared<Address>(0);
    undo.add([=] { give_back({device, handle, bytes, *mapped_at}); });
    driver_.map(device, address, bytes, handle);
    *mapped_at = address;
    driver_.allow_access(device, address, bytes, peers_of(device));
    return {address, bytes, handle};
  } catch (Error& error) {
    add_free_memory(error, driver_, device, bytes);
    throw error.with_tag(key.tag).with_device(device).with_bytes(bytes);
  }
}

void PhysicalMemory::drop(Arena& arena, const Chunk& chunk, Restore restore) {
  const int device = arena.key().device;
  try {
    driver_.unmap(device, chunk.address, chunk.bytes);
    {
      const Lock lock(map_.mutex);
      arena.drop_chunk(chunk.address, restore);
    }
    try {
      driver_.release(device, chunk.handle, chunk.bytes);
    } catch (...) {
      add({device, chunk.handle, chunk.bytes});
      throw;
    }
  } catch (Error& error) {
    throw error.with_tag(arena.key().tag).with_device(device).with_bytes(chunk.bytes);
  }
}

void PhysicalMemory::give_back(Arena& arena, const std::vector<Chunk>& chunks) {
  if (chunks.empty()) return;
  const int device = arena.key().device;
  constexpr char what[] = "memory that was freed stays mapped until the next release";
  const bool idle = attempt(what, [&] { driver_.synchronize(device); });
  for (const auto& chunk : chunks) {
    const bool unmapped = idle && attempt(what, [&] { driver_.unmap(device, chunk.address, chunk.bytes); });
    if (unmapped) give_back({device, chunk.handle, chunk.bytes});
    const Lock lock(map_.mutex);
    if (unmapped) {
      arena.reclaim(chunk.address, chunk.bytes);
    } else {
      arena.keep_chunk(chunk);
    }
  }
}

void PhysicalMemory::reserve(const Arena::Key& key, std::size_t bytes) {
  const Lock lock(reserved_mutex_);
  auto& handles = reserved_[{key.device, bytes}];
  handles.reserve(handles.size() + 1);
  try {
    handles.push_back(driver_.create(key.device, bytes));
  } catch (Error& error) {
    add_free_memory(error, driver_, key.device, bytes);
    throw error.with_tag(key.tag).with_device(key.device).with_bytes(bytes);
  }
}

std::optional<Handle> PhysicalMemory::take_reserved(int device, std::size_t bytes) {
  const Lock lock(reserved_mutex_);
  const auto found = reserved_.find({device, bytes});
  if (found == reserved_.end() || found->second.empty()) return std::nullopt;
  const Handle handle = found->second.back();
  found->second.pop_back();
  return handle;
}

void PhysicalMemory::give_back_reserved() noexcept {
  std::map<std::pair<int, std::size_t>, std::vector<Handle>> reserved;
  {
    const Lock lock(reserved_mutex_);
    reserved.swap(reserved_);
  }
  for (const auto& [key, handles] : reserved) {
    for (const Handle handle : handles) give_back({key.first, handle, key.second});
  }
}

std::map<int, std::size_t> PhysicalMemory::reserved_by_device() const {
  const Lock lock(reserved_mutex_);
  std::map<int, std::size_t> sums;
  for (const auto& [key, handles] : reserved_) {
    if (!handles.empty()) sums[key.first] += key.second * handles.size();
  }
  return sums;
}

void PhysicalMemory::give_back(Orphan orphan) noexcept {
  if (!try_give_back(orphan)) add(std::move(orphan));
}

bool PhysicalMemory::try_give_back(Orphan& orphan) noexcept {
  try {
    if (orphan.mapped_at != 0) {
      driver_.unmap(orphan.device, orphan.mapped_at, orphan.bytes);
      orphan.mapped_at = 0;
      const Lock map_lock(map_.mutex);
      const Lock lock(orphans_mutex_);
      if (const auto entry = find(orphan); entry != orphans_.end()) {
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

void PhysicalMemory::add(Orphan orphan) {
  const Lock lock(orphans_mutex_);
  orphans_.push_back(std::move(orphan));
}

std::vector<PhysicalMemory::Orphan>::iterator PhysicalMemory::find(const Orphan& orphan) {
  return std::find_if(orphans_.begin(), orphans_.end(),
                      [&](const Orphan& each) { return each.device == orphan.device && each.handle == orphan.handle; });
}

void PhysicalMemory::retry(bool wait) {
  if (wait) {
    retry_mutex_.lock();
  } else if (!retry_mutex_.try_lock()) {
    return;
  }
  const Lock one_at_a_time(retry_mutex_, std::adopt_lock);
  for (auto& orphan : orphans()) {
    if (!try_give_back(orphan)) continue;
    const Lock lock(orphans_mutex_);
    orphans_.erase(find(orphan));
  }
}

void PhysicalMemory::check_none_mapped(const MemoryMap&, const Arena& arena) const {
  for (const auto& orphan : orphans()) {
    if (orphan.mapped_at == 0 || !arena.owns(orphan.mapped_at)) continue;
    throw Error::from_driver(ErrorKind::driver, "unmap", "REFUSED", "an earlier failure left a range mapped")
        .with_tag(arena.key().tag)
        .with_device(orphan.device)
        .with_bytes(orphan.bytes)
        .with_address(orphan.mapped_at);
  }
}

void PhysicalMemory::withhold(const MemoryMap&, Arena& arena, Address address, std::size_t bytes) {
  const Lock lock(orphans_mutex_);
  for (auto& orphan : orphans_) {
    if (orphan.mapped_at == 0) continue;
    const Address from = std::max(address, orphan.mapped_at);
    const Address to = std::min(address + bytes, orphan.mapped_at + orphan.bytes);
    if (from >= to) continue;
    arena.withhold(from, to - from);
    orphan.arena = &arena;
    orphan.withheld.push_back({from, to - from});
  }
}

std::vector<PhysicalMemory::Orphan> PhysicalMemory::orphans() const {
  const Lock lock(orphans_mutex_);
  return orphans_;
}

}  // namespace memsaver
