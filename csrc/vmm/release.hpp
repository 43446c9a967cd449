#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "backup/host_pool.hpp"
#include "support/range_set.hpp"
#include "vmm/operation.hpp"

namespace memsaver {

// Gives the memory of its tags back to the driver, content kept as the restore policies say; Saver::release() has the
// contract.
class Release final : public Operation {
 public:
  using Overrides = std::map<std::string, Restore>;
  // Both arguments must outlive the release. `dead` is in address order.
  Release(Core& core, const std::vector<RangeSet::Range>& dead, const Overrides& overrides)
      : Operation(core, Progress::Operation::release), dead_(dead), overrides_(overrides) {}

 private:
  void plan(Arena& arena) REQUIRES(core_.backups.operation_mutex, core_.map.mutex) override;
  void plan_backup(const Arena& arena, Restore restore, const Allocation& allocation, Block& block, DeviceWork& work)
      REQUIRES(core_.map.mutex);
  void run() REQUIRES(core_.backups.operation_mutex) override;
  // When this throws, the chunk is as it was, or unmapped with its handle an orphan.
  void drop(DeviceWork& device, const DeviceWork::PlannedChunk& planned) EXCLUDES(core_.map.mutex);
  // Drops the backups of released content that a resume could not restore, if this release overrides its policy with
  // discard or zero; otherwise the tag would stay released for ever. Intact backups stay, whatever the override.
  void give_up_damaged() EXCLUDES(core_.map.mutex);

  const std::vector<RangeSet::Range>& dead_;
  const Overrides& overrides_;
  // What the backups need beyond what their blocks own.
  std::map<HostPool*, std::size_t> host_bytes_;
  std::size_t file_bytes_ = 0;
};

}  // namespace memsaver
