#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "backup/block.hpp"
#include "backup/shared_index.hpp"
#include "driver/driver.hpp"
#include "support/mutex.hpp"

namespace memsaver {

// The slabs of a store as one process has them: mapped, and registered with the driver.
class SharedMapping {
 public:
  SharedMapping(Driver& driver, int file) : driver_(driver), file_(file) {}
  // Unregisters and unmaps all.
  ~SharedMapping();

  // Held while a slab is registered: one at a time.
  Mutex pin_mutex ACQUIRED_BEFORE(mutex_);

  // Maps a slab unless it is. Throws ErrorKind::out_of_host_memory.
  void map(std::uint32_t slab, std::size_t bytes) EXCLUDES(mutex_);
  // Makes the pages of a mapped slab, with several threads, on a NUMA node (-1: any). Throws
  // ErrorKind::out_of_host_memory, with some of them made.
  void touch(std::uint32_t slab, int numa_node) EXCLUDES(mutex_);
  // Registers a mapped slab unless it is. Throws as Driver::register_host().
  void pin(std::uint32_t slab) EXCLUDES(mutex_, pin_mutex);
  void pin_all() EXCLUDES(mutex_, pin_mutex);
  // The same for the slabs around `ranges`.
  void pin(const std::vector<HostRange>& ranges) EXCLUDES(mutex_, pin_mutex);

  // The addresses of pieces in mapped slabs, `bytes` in all.
  [[nodiscard]] std::vector<HostRange> ranges_of(const std::vector<SharedIndex::Piece>& pieces, std::size_t bytes) const
      EXCLUDES(mutex_);
  [[nodiscard]] std::size_t pinned_bytes() const EXCLUDES(mutex_);

  struct Mapped {
    std::uintptr_t address;
    std::size_t bytes;
    bool pinned = false;
  };
  // Forgets those of the slabs that are mapped, so that map() maps them anew, for the caller to pass to let_go().
  [[nodiscard]] std::map<std::uint32_t, Mapped> forget(const std::vector<std::uint32_t>& slabs) REQUIRES(pin_mutex)
      EXCLUDES(mutex_);
  // Unregisters and unmaps. What the driver does not unregister is tried again with the next ones.
  void let_go(const std::map<std::uint32_t, Mapped>& slabs) EXCLUDES(mutex_);

 private:
  void unpin(const Mapped& slab);

  Driver& driver_;
  const int file_;
  mutable Mutex mutex_;
  std::map<std::uint32_t, Mapped> slabs_ GUARDED_BY(mutex_);
  std::vector<Mapped> still_pinned_ GUARDED_BY(mutex_);  // of slabs that were forgotten
};

}  // namespace memsaver
