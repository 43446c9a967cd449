#pragma once

#include "vmm/arena.hpp"
#include "vmm/memory_map.hpp"

namespace memsaver {

// Adds the needed and the free bytes to an out_of_device_memory error that lacks them.
inline void add_free_memory(Error& error, Driver& driver, int device, std::size_t bytes) {
  if (error.kind != ErrorKind::out_of_device_memory || error.needed_bytes != 0) return;
  try {
    error.with_memory(bytes, driver.memory_info(device).free_bytes);
  } catch (const Error&) {
    // The first error is the one to report.
  }
}

// Owns every physical handle: behind a chunk of the map, reserved for the next resume, or an orphan. Any thread may
// call any function. Errors name the tag, the device and the bytes.
class PhysicalMemory {
 public:
  // A handle that belongs to no chunk, and that the driver refused to unmap or to take back. Every operation and
  // allocation tries again; until then the free addresses at which it is mapped are withheld from their arena.
  struct Orphan {
    int device;
    Handle handle;
    std::size_t bytes;
    Address mapped_at = 0;  // 0: no longer mapped
    Arena* arena = nullptr;
    std::vector<RangeSet::Range> withheld = {};  // of `arena`
  };

  // `peer_access`: every visible device may reach the memory.
  PhysicalMemory(Driver& driver, MemoryMap& map, bool peer_access)
      : driver_(driver), map_(map), peer_access_(peer_access) {}
  // Gives all memory and addresses back, except in a forked child, which shares its parent's device memory. Addresses
  // at which something stays mapped remain reserved.
  ~PhysicalMemory() {
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

  // Creates and maps one chunk, with access to it, and adds its undo to `undo`; the caller adds it to the arena.
  // `reserved`: a handle of this size to use instead of a new one. Throws driver errors: `undo` holds what was done.
  [[nodiscard]] Chunk acquire(const Arena::Key& key, Address address, std::size_t bytes, Cleanup& undo,
                              std::optional<Handle> reserved = {}) EXCLUDES(map_.mutex) {
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
  // Unmaps and releases a chunk. A resume must restore its live ranges as `restore` says; without `restore` only a
  // resize brings them back. Throws driver errors: the chunk is as it was, or unmapped with its handle an orphan.
  void drop(Arena& arena, const Chunk& chunk, std::optional<Restore> restore) EXCLUDES(map_.mutex) {
    const int device = arena.key().device;
    try {
      driver_.unmap(device, chunk.address, chunk.bytes);
      {
        const Lock lock(map_.mutex);
        arena.drop_chunk(chunk.address, restore);
      }
      Cleanup on_failure([&] { add({device, chunk.handle, chunk.bytes}); });
      driver_.release(device, chunk.handle, chunk.bytes);
      on_failure.dismiss();
    } catch (Error& error) {
      throw error.with_tag(arena.key().tag).with_device(device).with_bytes(chunk.bytes);
    }
  }
  // Gives back chunks that Arena::remove_allocation() returned, after synchronizing the device as cudaFree does. What
  // the driver does not unmap stays in the arena until the next release, with a warning.
  void give_back(Arena& arena, const std::vector<Chunk>& chunks) EXCLUDES(map_.mutex) {
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
  // Reserves addresses for at least `bytes` more in the arena. `info` is of its device. Throws driver errors.
  void add_addresses(Arena& arena, std::size_t bytes, const DeviceInfo& info) EXCLUDES(map_.mutex) {
    // As large as the device: released allocations keep their addresses, so more may be needed later. The unused end
    // keeps neighbouring spans apart: nothing may lie in two reservations.
    const std::size_t span = round_up(std::max(bytes, info.total_bytes), info.granularity);
    const Address address = driver_.reserve(arena.key().device, span + info.granularity);
    const Lock lock(map_.mutex);
    arena.add_span(address, span);
  }

  // Reserves a handle of this size for the next resume, so that memory cannot run out. Throws driver errors: what was
  // reserved before stays reserved.
  void reserve(const Arena::Key& key, std::size_t bytes) EXCLUDES(reserved_mutex_) {
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
  // Returns a reserved handle of exactly this size, which is the caller's from now on; nothing if there is none.
  [[nodiscard]] std::optional<Handle> take_reserved(int device, std::size_t bytes) EXCLUDES(reserved_mutex_) {
    const Lock lock(reserved_mutex_);
    const auto found = reserved_.find({device, bytes});
    if (found == reserved_.end() || found->second.empty()) return std::nullopt;
    const Handle handle = found->second.back();
    found->second.pop_back();
    return handle;
  }
  // Gives all reserved handles back. Those that the driver refuses become orphans.
  void give_back_reserved() noexcept EXCLUDES(map_.mutex, reserved_mutex_) {
    std::map<std::pair<int, std::size_t>, std::vector<Handle>> reserved;
    {
      const Lock lock(reserved_mutex_);
      reserved.swap(reserved_);
    }
    for (const auto& [key, handles] : reserved) {
      for (const Handle handle : handles) give_back({key.first, handle, key.second});
    }
  }
  [[nodiscard]] std::map<int, std::size_t> reserved_by_device() const EXCLUDES(reserved_mutex_) {
    const Lock lock(reserved_mutex_);
    std::map<int, std::size_t> sums;
    for (const auto& [key, handles] : reserved_) {
      if (!handles.empty()) sums[key.first] += key.second * handles.size();
    }
    return sums;
  }

  // Tries once to give each orphan back, one thread at a time. If another thread is trying now: waits for it first if
  // `wait`, else does nothing.
  void retry(bool wait) EXCLUDES(map_.mutex, orphans_mutex_, retry_mutex_) {
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
  // Throws driver if an orphan is mapped at an address of the arena: no operation can map or account for memory there.
  // `map` must be the map of this object.
  void check_none_mapped([[maybe_unused]] const MemoryMap& map, const Arena& arena) const REQUIRES(map.mutex)
      EXCLUDES(orphans_mutex_) {
    for (const auto& orphan : orphans()) {
      if (orphan.mapped_at == 0 || !arena.owns(orphan.mapped_at)) continue;
      throw Error::from_driver(ErrorKind::driver, "unmap", "REFUSED", "an earlier operation could not unmap this range")
          .with_advice("repeat: each operation tries to unmap it again")
          .with_tag(arena.key().tag)
          .with_device(orphan.device)
          .with_bytes(orphan.bytes)
          .with_address(orphan.mapped_at);
    }
  }
  // Withholds the parts of a free range of `arena` at which an orphan is mapped.
  void withhold([[maybe_unused]] const MemoryMap& map, Arena& arena, Address address, std::size_t bytes)
      REQUIRES(map.mutex) EXCLUDES(orphans_mutex_) {
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
  [[nodiscard]] std::vector<Orphan> orphans() const EXCLUDES(orphans_mutex_) {
    const Lock lock(orphans_mutex_);
    return orphans_;
  }

 private:
  // Unmaps a handle if it is mapped, and releases it; keeps it as an orphan if the driver refuses.
  void give_back(Orphan orphan) noexcept EXCLUDES(map_.mutex, orphans_mutex_) {
    if (!try_give_back(orphan)) add(std::move(orphan));
  }
  // Tries once. Returns whether nothing is left; else `orphan`, and its entry in the list if any, say what is left.
  bool try_give_back(Orphan& orphan) noexcept EXCLUDES(map_.mutex, orphans_mutex_) {
    return attempt("device memory was not given back, the next operation tries again", [&] {
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
    });
  }
  void add(Orphan orphan) EXCLUDES(orphans_mutex_) {
    const Lock lock(orphans_mutex_);
    orphans_.push_back(std::move(orphan));
  }
  [[nodiscard]] std::vector<Orphan>::iterator find(const Orphan& orphan) REQUIRES(orphans_mutex_) {
    return std::find_if(orphans_.begin(), orphans_.end(), [&](const Orphan& each) {
      return each.device == orphan.device && each.handle == orphan.handle;
    });
  }
  [[nodiscard]] std::vector<int> peers_of(int device) {
    std::vector<int> peers;
    if (!peer_access_) return peers;
    for (int peer = 0; peer < driver_.device_count(); ++peer) {
      if (peer != device) peers.push_back(peer);
    }
    return peers;
  }

  const pid_t process_ = getpid();
  Driver& driver_;
  MemoryMap& map_;
  const bool peer_access_;
  mutable Mutex reserved_mutex_;
  std::map<std::pair<int, std::size_t>, std::vector<Handle>> reserved_ GUARDED_BY(reserved_mutex_);  // device and size
  Mutex retry_mutex_ ACQUIRED_BEFORE(MemoryMap::mutex, orphans_mutex_);
  mutable Mutex orphans_mutex_ ACQUIRED_AFTER(MemoryMap::mutex);
  std::vector<Orphan> orphans_ GUARDED_BY(orphans_mutex_);
};

}  // namespace memsaver
