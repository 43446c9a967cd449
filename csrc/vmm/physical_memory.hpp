#pragma once

#include <unistd.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "driver/driver.hpp"
#include "support/error.hpp"
#include "support/transaction.hpp"
#include "vmm/arena.hpp"
#include "vmm/memory_map.hpp"
#include "vmm/orphans.hpp"

namespace memsaver {

// Adds what was needed and is free to an error that says that device memory is short, unless it tells that already.
void add_free_memory(Error& error, Driver& driver, int device, std::size_t bytes);

// Puts physical memory behind ranges of the map and takes it away. What the driver refuses becomes an orphan.
class PhysicalMemory {
 public:
  // `peer_access`: every visible device may reach the memory.
  PhysicalMemory(Driver& driver, MemoryMap& map, Orphans& orphans, bool peer_access)
      : driver_(driver), map_(map), orphans_(orphans), peer_access_(peer_access) {}
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
  void reserve(Arena& arena, std::size_t bytes, const DeviceInfo& info) EXCLUDES(map_.mutex);

 private:
  [[nodiscard]] std::vector<int> peers_of(int device);

  const pid_t process_ = getpid();
  Driver& driver_;
  MemoryMap& map_;
  Orphans& orphans_;
  const bool peer_access_;
};

}  // namespace memsaver
