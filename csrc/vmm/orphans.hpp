#pragma once

#include <cstddef>
#include <vector>

#include "driver/driver.hpp"
#include "support/mutex.hpp"
#include "support/range_set.hpp"
#include "vmm/arena.hpp"
#include "vmm/memory_map.hpp"

namespace memsaver {

// Physical handles that the driver refused to unmap or to take back. They belong to no chunk; every operation and
// allocation tries again to give them back. Free addresses that an orphan is still mapped at are withheld from their
// arena until it is unmapped.
class Orphans {
 public:
  struct Orphan {
    int device;
    Handle handle;
    std::size_t bytes;
    Address mapped_at = 0;  // 0: no longer mapped
    Arena* arena = nullptr;
    std::vector<RangeSet::Range> withheld = {};  // of `arena`
  };

  explicit Orphans(Driver& driver) : driver_(driver) {}

  // Unmaps a handle if it is mapped, and releases it; keeps it as an orphan if the driver refuses.
  void give_back(MemoryMap& map, Orphan orphan) noexcept EXCLUDES(map.mutex, mutex_);
  // Tries once to unmap and release; returns true if nothing remains. `orphan`, and its entry if it is on the list, say
  // what is left.
  bool try_give_back(MemoryMap& map, Orphan& orphan) noexcept EXCLUDES(map.mutex, mutex_);
  void add(Orphan orphan) EXCLUDES(mutex_);

  // Tries once to give each orphan back, one thread at a time.
  void retry(MemoryMap& map) EXCLUDES(map.mutex, mutex_, retry_mutex_);
  // The same, unless another thread is retrying.
  void retry_unless_busy(MemoryMap& map) EXCLUDES(map.mutex, mutex_, retry_mutex_);

  // Throws ErrorKind::driver if an orphan is mapped at an address of the arena: no operation can map or account for
  // memory there.
  void check_none_mapped(const MemoryMap& map, const Arena& arena) const REQUIRES(map.mutex) EXCLUDES(mutex_);
  // Withholds the parts of a free range of `arena` that an orphan is mapped at.
  void withhold(const MemoryMap& map, Arena& arena, Address address, std::size_t bytes) REQUIRES(map.mutex)
      EXCLUDES(mutex_);
  [[nodiscard]] std::vector<Orphan> list() const EXCLUDES(mutex_);

 private:
  void retry_each(MemoryMap& map) REQUIRES(retry_mutex_) EXCLUDES(map.mutex, mutex_);
  [[nodiscard]] std::vector<Orphan>::iterator find(const Orphan& orphan) REQUIRES(mutex_);

  Driver& driver_;
  Mutex retry_mutex_ ACQUIRED_BEFORE(MemoryMap::mutex, mutex_);
  mutable Mutex mutex_ ACQUIRED_AFTER(MemoryMap::mutex);
  std::vector<Orphan> list_ GUARDED_BY(mutex_);
};

}  // namespace memsaver
