#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <vector>

#include "backup/backup_store.hpp"
#include "driver/driver.hpp"
#include "support/progress.hpp"
#include "vmm/memory_map.hpp"
#include "vmm/orphans.hpp"
#include "vmm/physical_memory.hpp"
#include "vmm/reservation.hpp"
#include "vmm/settings.hpp"
#include "vmm/thread_stacks.hpp"

namespace memsaver {

// The parts of a Saver, each made before and destroyed after those that use it. Lock order: backups.operation_mutex,
// the retries of orphans, map.mutex, then the mutex of any other part.
struct Core {
  Core(std::unique_ptr<Driver> its_driver, Settings settings);
  ~Core();

  // Throws ErrorKind::forked in a child of the process that made the saver. Called before any lock is taken: the parent
  // may have held it when it forked.
  void check_process() const;
  // Also throws ErrorKind::context_lost once the device context is lost.
  void check_usable() const;

  // Asks the driver what later calls need to know of a device and its neighbours, once.
  void learn_device(int device) EXCLUDES(map.mutex);
  // Removes an allocation and its backups. Returns the chunks for the caller to pass to PhysicalMemory::give_back(),
  // without the lock.
  [[nodiscard]] std::vector<Chunk> forget(Arena& arena, Address address) REQUIRES(map.mutex);
  // Drops the backups of resident memory under `tags`.
  void drop_backups(const MemoryMap::Tags& tags) REQUIRES(backups.operation_mutex) EXCLUDES(map.mutex);

  const pid_t process = getpid();
  std::unique_ptr<Driver> driver;
  Progress progress;
  MemoryMap map;
  Orphans orphans;
  Reservation reservation;
  ThreadStacks stacks;
  PhysicalMemory physical;
  BackupStore backups;
  std::atomic<bool> closed{false};
  std::atomic<std::size_t> memory_margin{0};
};

}  // namespace memsaver
