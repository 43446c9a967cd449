#pragma once

#include <cstddef>
#include <map>

#include "driver/driver.hpp"
#include "support/mutex.hpp"
#include "vmm/memory_map.hpp"
#include "vmm/physical_memory.hpp"

namespace memsaver {

// Owns the limits to restore of the stacks of kernels. A context holds device memory for the stacks of all threads that
// its kernels can run at once: by default 1 KiB each, 264 MiB on an H200 (132 multiprocessors of 2,048 threads), and
// more once a kernel needed more. A CUDA graph that was captured before runs after a change, too: a launch raises the
// limit if necessary. Any thread may call any function.
class ThreadStacks {
 public:
  ThreadStacks(Driver& driver, const MemoryMap& map, const PhysicalMemory& physical)
      : driver_(driver), map_(map), physical_(physical) {}
  ThreadStacks(const ThreadStacks&) = delete;
  ThreadStacks& operator=(const ThreadStacks&) = delete;

  // Lowers the limit on every device on which no memory under a tag is resident or reserved: its engine runs no kernel.
  // What the driver refuses is logged.
  void lower() noexcept EXCLUDES(map_.mutex, mutex_);
  // Raises the limit of a device to what it was. Throws driver errors: the limit is as before the call.
  void raise(int device) EXCLUDES(mutex_);

 private:
  Driver& driver_;
  const MemoryMap& map_;
  const PhysicalMemory& physical_;
  Mutex mutex_;
  std::map<int, std::size_t> limits_ GUARDED_BY(mutex_);  // before they were lowered, by device
};

}  // namespace memsaver
