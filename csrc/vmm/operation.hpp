#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "support/error.hpp"
#include "support/transaction.hpp"
#include "vmm/core.hpp"
#include "vmm/reports.hpp"

namespace memsaver {

// What an operation does on one device.
struct DeviceWork {
  struct PlannedChunk {
    Arena* arena;
    Chunk chunk;      // resume: without a handle until it is acquired
    Restore restore;  // release: what its live ranges are owed afterwards; resume: what they are owed now
  };
  int device = -1;
  std::vector<ContentBlock> blocks;               // content to keep or restore
  std::vector<PlannedChunk> kept;                 // chunks under content
  std::vector<PlannedChunk> others;               // chunks whose content is not kept
  std::map<std::string, std::size_t> done_bytes;  // released or mapped, by tag
  std::size_t freed_bytes = 0;
  double first_memory_seconds = 0;
  std::vector<PlannedChunk> acquired;
  Transaction transaction;
  PipelineSeconds seconds;

  // Sorts blocks, and the chunks under them, by address, as Pipeline expects them.
  void sort();
  // Names all tags, for errors.
  [[nodiscard]] std::string tags() const;
  [[nodiscard]] std::size_t bytes() const;
};

// A release or a resume: planned under the lock of the map, run without it.
class Operation {
 public:
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  virtual ~Operation() = default;

  // Waits for the operation under way, marks the arenas of `tags` busy and plans them all at the same instant, then
  // runs the plan. Afterwards, also when this throws, no arena is busy and deferred frees are done. An error that names
  // no tags and bytes gets those of the plan.
  OperationResult perform(const MemoryMap::Tags& tags);

 protected:
  Operation(Core& core, Progress::Operation kind) : core_(core), kind_(kind) {}

  // Adds the work of one arena to devices_, and what it needs to its own members.
  virtual void plan(Arena& arena) REQUIRES(core_.backups.operation_mutex, core_.map.mutex) = 0;
  virtual void run() REQUIRES(core_.backups.operation_mutex) = 0;

  // The work of a device, made if there is none yet.
  [[nodiscard]] DeviceWork& on(int device);
  // Calls `work` for each of devices_, side by side, and waits for all of them. Throws the first failure.
  void on_each_device(const std::function<void(DeviceWork&)>& work);
  // Adds bringing back `runs` of an arena, which have no memory, to devices_.
  void plan_return(Arena& arena, const std::vector<RangeSet::Range>& runs)
      REQUIRES(core_.backups.operation_mutex, core_.map.mutex);
  // Does what plan_return() planned, all or nothing: when this throws, all of it is released with its backups. With
  // `map_first` everything is mapped before the first content moves.
  void bring_back(bool map_first) REQUIRES(core_.backups.operation_mutex);
  [[nodiscard]] double seconds() const;
  // Of the chunks of all devices.
  [[nodiscard]] std::size_t bytes() const;

  Core& core_;
  const Progress::Operation kind_;
  std::vector<Arena*> arenas_;         // busy with this operation
  std::map<int, DeviceWork> devices_;  // those with something to do
  std::size_t content_bytes_ = 0;      // to keep or restore

 private:
  void bring_back(DeviceWork& device, bool map_first) REQUIRES(core_.backups.operation_mutex) EXCLUDES(core_.map.mutex);
  void begin(const MemoryMap::Tags& tags) REQUIRES(core_.backups.operation_mutex);
  void end();
  [[nodiscard]] OperationResult result() const REQUIRES(core_.map.mutex);
  void name_work(Error& error, const MemoryMap::Tags& tags) const;

  std::vector<std::set<Restore>> owed_before_;  // what each of arenas_ owed when the operation began
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Saver::release(), Saver::resume(), Saver::reserve() and Saver::give_back_reserved() have the contracts.
OperationResult release(Core& core, const MemoryMap::Tags& tags, const std::vector<RangeSet::Range>& dead,
                        const std::map<std::string, Restore>& overrides);
OperationResult resume(Core& core, const MemoryMap::Tags& tags);
void reserve(Core& core, const MemoryMap::Tags& tags);
void give_back_reserved(Core& core) noexcept;

}  // namespace memsaver
