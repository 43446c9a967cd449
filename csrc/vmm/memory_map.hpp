#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "backup/backup_store.hpp"
#include "driver/driver.hpp"
#include "support/mutex.hpp"
#include "support/progress.hpp"
#include "vmm/arena.hpp"
#include "vmm/reports.hpp"

namespace memsaver {

// Owns the arenas of all devices, tags and restore policies. Calls no driver.
class MemoryMap {
 public:
  using Tags = std::vector<std::string>;  // empty: all

  // Guards the map and every arena in it. Never held across a call to a device, a copy, a file operation or a wait, so
  // that allocations and status do not wait for an operation.
  mutable Mutex mutex ACQUIRED_AFTER(BackupStore::operation_mutex);

  [[nodiscard]] bool knows(int device) const EXCLUDES(mutex);
  void add_device(int device, const DeviceInfo& info) EXCLUDES(mutex);
  // Returns what was added for a device; it stays valid and unchanged as long as the map.
  [[nodiscard]] const DeviceInfo& info_of(int device) const REQUIRES(mutex) { return infos_.at(device); }

  // Returns the arena, made if there is none. An arena lives as long as the map.
  [[nodiscard]] Arena& arena_for(const Arena::Key& key) REQUIRES(mutex);
  // Returns the arena whose addresses include this one, or null.
  [[nodiscard]] Arena* arena_of(Address address) const REQUIRES(mutex);
  [[nodiscard]] std::vector<Arena*> select(const Tags& tags) const REQUIRES(mutex);
  // Sets what arenas that are busy are busy with.
  void set_operation(Progress::Operation kind) REQUIRES(mutex) { operation_ = kind; }

  // Fills in the tags, their bytes, and the state.
  void describe(SaverStatus& status) const REQUIRES(mutex);
  // Returns the sum of Arena::unprepared_bytes() of what is kept in host memory, without busy arenas.
  [[nodiscard]] std::size_t unprepared_bytes() const REQUIRES(mutex);
  [[nodiscard]] std::vector<int> devices() const EXCLUDES(mutex);

 private:
  void describe(const Arena& arena, TagSnapshot& tag) const REQUIRES(mutex);

  std::map<Arena::Key, std::unique_ptr<Arena>> arenas_ GUARDED_BY(mutex);
  std::map<int, DeviceInfo> infos_ GUARDED_BY(mutex);
  Progress::Operation operation_ GUARDED_BY(mutex) = Progress::Operation::none;
};

// Returns the names, separated by commas, for messages.
[[nodiscard]] std::string joined(const std::vector<std::string>& names);

}  // namespace memsaver
