#pragma once

#include <unistd.h>

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "driver/driver.hpp"
#include "support/error.hpp"
#include "support/mutex.hpp"
#include "support/range_set.hpp"
#include "support/transaction.hpp"
#include "vmm/arena.hpp"
#include "vmm/memory_map.hpp"

namespace memsaver {

// Adds what was needed and is free to an error that says that device memory is short, unless it tells that already.
void add_free_memory(Error& error, Driver& driver, int device, std::size_t bytes);

// Every physical handle: behind a chunk of the map, reserved for the next resume, or an orphan.
class PhysicalMemory {
 public:
  // A handle that the driver refused to unmap or to take back. It belongs to no chunk; every operation and allocation
  // tries again to give it back. Free addresses that it is still mapped at are withheld from their arena until it is
  // unmapped.
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
  // that something stays mapped at remain reserved until the process ends.
  ~PhysicalMemory();

  // Creates, maps and makes readable one chunk; its undo goes on the transaction. Does not tell the arena. When this
  // throws, the transaction holds what there is to undo. `reserved`: a handle of this size to use instead of a new one.
  [[nodiscard]] Chunk acquire(const Arena::Key& key, Address address, std::size_t bytes, Transaction& transaction,
                              std::optional<Handle> reserved = {}) EXCLUDES(map_.mutex);
  // Unmaps and releases a chunk; from then on its live ranges are owed what `restore` says. When this throws, the chunk
  // is as it was, or unmapped with its handle an orphan.
  void drop(Arena& arena, const Chunk& chunk, Restore restore) EXCLUDES(map_.mutex);
  // Gives back chunks that Arena::remove_allocation() returned, after synchronizing the device as cudaFree does. Chunks
  // that cannot be unmapped stay in the arena until the next release, with a warning.
  void give_back(Arena& arena, const std::vector<Chunk>& chunks) EXCLUDES(map_.mutex);
  // Reserves addresses for at least `bytes` more in the arena. `info`: of its device.
  void add_addresses(Arena& arena, std::size_t bytes, const DeviceInfo& info) EXCLUDES(map_.mutex);

  // Reserves a handle of this size for the next resume, so that memory cannot run out. When this throws, as
  // Driver::create(), what was reserved before still is.
  void reserve(const Arena::Key& key, std::size_t bytes) EXCLUDES(reserved_mutex_);
  // A reserved handle of exactly this size, which is the caller's from now on; empty if there is none.
  [[nodiscard]] std::optional<Handle> take_reserved(int device, std::size_t bytes) EXCLUDES(reserved_mutex_);
  // What the driver refuses becomes an orphan.
  void give_back_reserved() noexcept EXCLUDES(map_.mutex, reserved_mutex_);
  [[nodiscard]] std::map<int, std::size_t> reserved_by_device() const EXCLUDES(reserved_mutex_);

  // Tries once to give each orphan back, one thread at a time. Without `wait` it does nothing if another thread is at
  // it.
  void retry(bool wait) EXCLUDES(map_.mutex, orphans_mutex_, retry_mutex_);
  // Throws ErrorKind::driver if an orphan is mapped at an address of the arena: no operation can map or account for
  // memory there. `map`: the one of this object.
  void check_none_mapped(const MemoryMap& map, const Arena& arena) const REQUIRES(map.mutex) EXCLUDES(orphans_mutex_);
  // Withholds the parts of a free range of `arena` that an orphan is mapped at.
  void withhold(const MemoryMap& map, Arena& arena, Address address, std::size_t bytes) REQUIRES(map.mutex)
      EXCLUDES(orphans_mutex_);
  [[nodiscard]] std::vector<Orphan> orphans() const EXCLUDES(orphans_mutex_);

 private:
  // Unmaps a handle if it is mapped, and releases it; keeps it as an orphan if the driver refuses.
  void give_back(Orphan orphan) noexcept EXCLUDES(map_.mutex, orphans_mutex_);
  // Tries once; returns true if nothing remains. `orphan`, and its entry if it is on the list, say what is left.
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
