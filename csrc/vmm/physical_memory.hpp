#pragma once

#include <unistd.h>

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "driver/driver.hpp"
#include "support/cleanup.hpp"
#include "support/error.hpp"
#include "support/mutex.hpp"
#include "support/range_set.hpp"
#include "vmm/arena.hpp"
#include "vmm/memory_map.hpp"

namespace memsaver {

// Adds the needed and the free bytes to an out_of_device_memory error that lacks them.
void add_free_memory(Error& error, Driver& driver, int device, std::size_t bytes);

// Owns every physical handle: behind a chunk of the map, reserved for the next resume, or an orphan. Any thread may
// call any function. Errors name the tag, the device and the bytes.
class PhysicalMemory {
 public:
  // A handle that the driver refused to unmap or to take back. It belongs to no chunk; every operation and allocation
  // tries again to give it back. Free addresses at which it is still mapped are withheld from their arena until then.
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
  PhysicalMemory(const PhysicalMemory&) = delete;
  PhysicalMemory& operator=(const PhysicalMemory&) = delete;
  // Gives all memory and addresses back, except in a forked child, which shares its parent's device memory. Addresses
  // at which something stays mapped remain reserved until the process ends.
  ~PhysicalMemory();

  // Creates and maps one chunk, with access to it, and adds its undo to `undo`; the caller adds it to the arena.
  // `reserved`: a handle of this size to use instead of a new one. Throws driver errors: `undo` holds what was done.
  [[nodiscard]] Chunk acquire(const Arena::Key& key, Address address, std::size_t bytes, Cleanup& undo,
                              std::optional<Handle> reserved = {}) EXCLUDES(map_.mutex);
  // Unmaps and releases a chunk, whose live ranges a resume must restore as `restore` says. Throws driver errors: the
  // chunk is as it was, or unmapped with its handle an orphan.
  void drop(Arena& arena, const Chunk& chunk, Restore restore) EXCLUDES(map_.mutex);
  // Gives back chunks that Arena::remove_allocation() returned, after synchronizing the device as cudaFree does. Chunks
  // that the driver does not unmap stay in the arena until the next release, with a warning.
  void give_back(Arena& arena, const std::vector<Chunk>& chunks) EXCLUDES(map_.mutex);
  // Reserves addresses for at least `bytes` more in the arena. `info` is of its device. Throws driver errors.
  void add_addresses(Arena& arena, std::size_t bytes, const DeviceInfo& info) EXCLUDES(map_.mutex);

  // Reserves a handle of this size for the next resume, so that memory cannot run out. Throws driver errors: what was
  // reserved before still is.
  void reserve(const Arena::Key& key, std::size_t bytes) EXCLUDES(reserved_mutex_);
  // Returns a reserved handle of exactly this size, which is the caller's from now on; nothing if there is none.
  [[nodiscard]] std::optional<Handle> take_reserved(int device, std::size_t bytes) EXCLUDES(reserved_mutex_);
  // Gives all reserved handles back. Those that the driver refuses become orphans.
  void give_back_reserved() noexcept EXCLUDES(map_.mutex, reserved_mutex_);
  [[nodiscard]] std::map<int, std::size_t> reserved_by_device() const EXCLUDES(reserved_mutex_);

  // Tries once to give each orphan back, one thread at a time. If another thread does so, waits for it and tries again
  // if `wait`; else does nothing.
  void retry(bool wait) EXCLUDES(map_.mutex, orphans_mutex_, retry_mutex_);
  // Throws driver if an orphan is mapped at an address of the arena: no operation can map or account for memory there.
  // `map` is that of this object.
  void check_none_mapped(const MemoryMap& map, const Arena& arena) const REQUIRES(map.mutex) EXCLUDES(orphans_mutex_);
  // Withholds the parts of a free range of `arena` at which an orphan is mapped.
  void withhold(const MemoryMap& map, Arena& arena, Address address, std::size_t bytes) REQUIRES(map.mutex)
      EXCLUDES(orphans_mutex_);
  [[nodiscard]] std::vector<Orphan> orphans() const EXCLUDES(orphans_mutex_);

 private:
  // Unmaps a handle if it is mapped, and releases it; keeps it as an orphan if the driver refuses.
  void give_back(Orphan orphan) noexcept EXCLUDES(map_.mutex, orphans_mutex_);
  // Tries once. Returns whether nothing is left; else `orphan`, and its entry if it is on the list, say what.
  bool try_give_back(Orphan& orphan) noexcept EXCLUDES(map_.mutex, orphans_mutex_);
  void add(Orphan orphan) EXCLUDES(orphans_mutex_);
  [[nodiscard]] std::vector<Orphan>::iterator find(const Orphan& orphan) REQUIRES(orphans_mutex_);
  [[nodiscard]] std::vector<int> peers_of(int device);

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
