#pragma once

#include <unistd.h>

#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "driver/driver.hpp"
#include "support/mutex.hpp"
#include "vmm/memory_map.hpp"
#include "vmm/orphans.hpp"

namespace memsaver {

// Device memory that was taken for the next resume and is not mapped yet, so that it cannot run out.
class Reservation {
 public:
  Reservation(Driver& driver, MemoryMap& map, Orphans& orphans) : driver_(driver), map_(map), orphans_(orphans) {}
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  // Gives it back, except in a forked child, which shares its parent's device memory.
  ~Reservation() {
    if (getpid() == process_) give_back();
  }

  // Creates a handle of this size. When this throws, as Driver::create(), what was held before still is.
  void add(int device, std::size_t bytes) EXCLUDES(mutex_);
  // A handle of exactly this size, which is the caller's from now on; empty if none is held.
  [[nodiscard]] std::optional<Handle> take(int device, std::size_t bytes) EXCLUDES(mutex_);
  // Gives all of it back. What the driver refuses becomes an orphan.
  void give_back() noexcept EXCLUDES(map_.mutex, mutex_);
  [[nodiscard]] std::map<int, std::size_t> bytes_by_device() const EXCLUDES(mutex_);

 private:
  using Handles = std::map<std::pair<int, std::size_t>, std::vector<Handle>>;  // by device and size

  const pid_t process_ = getpid();
  Driver& driver_;
  MemoryMap& map_;
  Orphans& orphans_;
  mutable Mutex mutex_;
  Handles handles_ GUARDED_BY(mutex_);
};

}  // namespace memsaver
