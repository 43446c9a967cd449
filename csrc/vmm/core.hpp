#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <vector>

#include "backup/backup_store.hpp"
#include "driver/driver.hpp"
#include "support/progress.hpp"
#include "vmm/arena.hpp"
#include "vmm/memory_map.hpp"
#include "vmm/orphans.hpp"
#include "vmm/physical_memory.hpp"
#include "vmm/settings.hpp"

namespace memsaver {

// The parts of a Saver, each made before and destroyed after those that use it.
//
// Lock order: backups.operation_mutex, then the retries of orphans, then map.mutex, then the mutex of a part.
struct Core {
  Core(std::unique_ptr<Driver> its_driver, Settings settings);
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;
  ~Core();

  // Throws ErrorKind::forked in a child of the process that made the saver. To be called before any lock, which the
  // parent may have held when it forked.
  void check_process() const;
  // Also throws ErrorKind::context_lost once the device context is lost.
  void check_usable() const;

  // Asks the driver what later calls need to know of a device and its neighbours, once.
  void learn_device(int device) EXCLUDES(map.mutex);
  // Takes an allocation and its backups out of the account. The caller gives the chunks that it returns back, without
  // the lock: PhysicalMemory::give_back().
  [[nodiscard]] std::vector<Chunk> forget(Arena& arena, Address address) REQUIRES(map.mutex);
  // Drops the backups of resident memory under `tags`.
  void drop_backups(const MemoryMap::Tags& tags) REQUIRES(backups.operation_mutex) EXCLUDES(map.mutex);

  const pid_t process = getpid();
  std::unique_ptr<Driver> driver;
  Progress progress;
  MemoryMap map;
  Orphans orphans;
  PhysicalMemory physical;
  BackupStore backups;
  std::atomic<bool> closed{false};
  std::atomic<std::size_t> memory_margin{0};
};

}  // namespace memsaver
