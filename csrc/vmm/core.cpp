#include "vmm/core.hpp"

#include <set>
#include <string>
#include <utility>

#include "support/error.hpp"
#include "support/host_memory.hpp"

namespace memsaver {

namespace {

BackupStore::Options backup_options(const Settings& settings) {
  std::size_t limit = settings.host_backup_limit;
  if (limit == 0) limit = available_memory_bytes() / 5 * 4;
  return {limit, settings.file_folder, settings.retention, settings.verify, settings.pack, settings.shared_backups};
}

}  // namespace

Core::Core(std::unique_ptr<Driver> its_driver, Settings settings)
    : driver(std::move(its_driver)),
      orphans(*driver),
      reservation(*driver, map, orphans),
      stacks(*driver, map, reservation),
      physical(*driver, map, orphans, settings.peer_access),
      backups(*driver, backup_options(settings), progress,
              [this]() REQUIRES(backups.operation_mutex) { drop_backups({}); }) {}

Core::~Core() {
  // A forked child shares the device memory of its parent, and must end nothing.
  if (getpid() != process) (void)driver.release();
}

void Core::check_process() const {
  if (getpid() == process) return;
  throw Error(ErrorKind::forked, "memsaver was set up in process " + std::to_string(process) +
                                     " and cannot be used in its forked child " + std::to_string(getpid()) +
                                     "; start workers with the 'spawn' method");
}

void Core::check_usable() const {
  check_process();
  const std::string why = driver->loss();
  if (!why.empty()) throw Error(ErrorKind::context_lost, why).with_advice("restart the process");
}

void Core::learn_device(int device) {
  if (map.knows(device)) return;
  const DeviceInfo info = driver->device_info(device);
  std::set<int> nodes;
  for (int each = 0; each < driver->device_count(); ++each) {
    nodes.insert(each == device ? info.numa_node : driver->device_info(each).numa_node);
  }
  backups.add_device(device, info.numa_node, nodes);
  map.add_device(device, info);
}

std::vector<Chunk> Core::forget(Arena& arena, Address address) {
  Allocation& allocation = arena.allocations().at(address);
  const std::size_t bytes = allocation.bytes;
  for (auto& block : allocation.blocks) backups.give_back(block, arena.key().device);
  std::vector<Chunk> chunks = arena.remove_allocation(address);
  orphans.withhold(map, arena, address, bytes);
  return chunks;
}

void Core::drop_backups(const MemoryMap::Tags& tags) {
  const Lock lock(map.mutex);
  for (Arena* const arena : map.select(tags)) {
    for (auto& [address, allocation] : arena->allocations()) {
      if (!arena->is_mapped(address, allocation.bytes)) continue;
      for (auto& block : allocation.blocks) backups.give_back(block, arena->key().device);
    }
  }
}

}  // namespace memsaver
