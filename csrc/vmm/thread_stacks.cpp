#include "vmm/thread_stacks.hpp"

#include <algorithm>
#include <exception>
#include <string>

#include "support/error.hpp"
#include "support/log.hpp"

namespace memsaver {

static constexpr std::size_t kSmallestStack = 16;  // CUDA does not document that it accepts 0

void ThreadStacks::lower() noexcept {
  try {
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
  } catch (const std::exception& error) {
    warn(std::string("the stacks of kernels stay on the device: ") + error.what());
  }
}

void ThreadStacks::raise(int device) {
  const Lock lock(mutex_);
  const auto found = limits_.find(device);
  if (found == limits_.end()) return;
  try {
    if (driver_.stack_limit(device) < found->second) driver_.set_stack_limit(device, found->second);
  } catch (Error& error) {
    throw error.with_device(device).with_advice(
        "everything stays released with its backup; let other processes free memory and repeat");
  }
  limits_.erase(found);
}

}  // namespace memsaver
