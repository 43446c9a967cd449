#pragma once

#include "vmm/memory_map.hpp"
#include "vmm/physical_memory.hpp"

namespace memsaver {

// Lowers the stack limits of kernels (Driver::stack_limit()), and raises them to what they were: by default 1 KiB,
// which is 264 MiB on an H200 (132 multiprocessors of 2,048 threads), and more once a kernel needed more. A graph that
// was captured before a change runs after it. Any thread may call any function.
class ThreadStacks {
 public:
  ThreadStacks(Driver& driver, const MemoryMap& map, const PhysicalMemory& physical)
      : driver_(driver), map_(map), physical_(physical) {}

  // Lowers the limit on every device on which no memory under a tag is resident or reserved: its engine runs no kernel.
  // What the driver refuses is logged.
  void lower() noexcept EXCLUDES(map_.mutex, mutex_) {
    attempt("the stacks of kernels stay on the device", [this] {
      const auto reserved = physical_.reserved_by_device();
      for (const int device : map_.devices()) {
        bool idle = reserved.count(device) == 0;
        {
          const Lock lock(map_.mutex);
          for (const Arena* const arena : map_.select({})) {
            idle = idle && (arena->key().device != device || arena->chunks().empty());
          }
        }
        if (!idle) continue;
        const Lock lock(mutex_);
        const std::size_t limit = driver_.stack_limit(device);
        if (limit <= kSmallestStack) continue;
        limits_[device] = std::max(limits_[device], limit);
        driver_.set_stack_limit(device, kSmallestStack);
      }
    });
  }
  // Raises the limit of a device to what it was. Throws driver errors: the limit is as before the call. `after` is the
  // state that such an error leaves.
  void raise(int device, const std::string& after) EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    const auto found = limits_.find(device);
    if (found == limits_.end()) return;
    try {
      if (driver_.stack_limit(device) < found->second) driver_.set_stack_limit(device, found->second);
    } catch (Error& error) {
      throw error.with_device(device).with_advice(after + "; let other processes free memory and repeat");
    }
    limits_.erase(found);
  }

 private:
  static constexpr std::size_t kSmallestStack = 16;  // CUDA does not document that it accepts 0

  Driver& driver_;
  const MemoryMap& map_;
  const PhysicalMemory& physical_;
  Mutex mutex_;
  std::map<int, std::size_t> limits_ GUARDED_BY(mutex_);  // before they were lowered, by device
};

}  // namespace memsaver
