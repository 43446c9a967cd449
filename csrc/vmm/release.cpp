#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/log.hpp"
#include "support/scope_exit.hpp"
#include "support/sizes.hpp"
#include "vmm/operation.hpp"

namespace memsaver {

namespace {

// A dead range smaller than this is copied along with its neighbours: copying 64 KiB takes about a microsecond, a
// further copy several.
constexpr std::size_t kSmallestGap = kSizeUnit / 16;
constexpr std::size_t kFirstMemory = 64 * kSizeUnit;

// The part of a block that holds content: all but `dead`, which is in address order.
std::vector<Extent> live_extents(const Allocation& allocation, const Block& block,
                                 const std::vector<RangeSet::Range>& dead) {
  std::vector<Extent> extents;
  const Address begin = allocation.address + block.offset;
  const Address end = begin + block.bytes;
  const auto add = [&](Address from, Address to) {
    if (from < to) extents.push_back({from - allocation.address, to - from});
  };
  auto range = std::partition_point(dead.begin(), dead.end(),
                                    [&](const auto& each) { return each.begin + each.bytes <= begin; });
  Address at = begin;
  for (; range != dead.end() && range->begin < end; ++range) {
    const Address from = std::max(begin, range->begin);
    const Address to = std::min(end, range->begin + range->bytes);
    if (to - from < kSmallestGap) continue;
    add(at, from);
    at = to;
  }
  add(at, end);
  return extents;
}

// The room that is needed beyond what is owned already.
std::size_t beyond(std::size_t needed, std::size_t owned) { return needed > owned ? needed - owned : 0; }

class Release final : public Operation {
 public:
  Release(Core& core, const std::vector<RangeSet::Range>& dead, const std::map<std::string, Restore>& overrides)
      : Operation(core, Progress::Operation::release), dead_(dead), overrides_(overrides) {}

 private:
  void plan(Arena& arena) REQUIRES(core_.backups.operation_mutex, core_.map.mutex) override {
    if (arena.chunks().empty()) return;
    const int device = arena.key().device;
    const auto changed = overrides_.find(arena.key().tag);
    const Restore restore = changed != overrides_.end() ? changed->second : arena.key().restore;
    DeviceWork& work = on(device);
    for (const auto& [address, chunk] : arena.chunks()) {
      (keeps_content(restore) ? work.kept : work.others).push_back({&arena, chunk, restore});
    }
    if (keeps_content(restore)) arena.make_blocks();
    for (auto& [address, allocation] : arena.allocations()) {
      for (auto& block : allocation.blocks) {
        if (!arena.is_mapped(address + block.offset, block.bytes)) continue;
        if (keeps_content(restore)) {
          plan_backup(arena, restore, allocation, block, work);
        } else {
          core_.backups.give_back(block, device);  // a backup older than the resident content is stale
        }
      }
    }
  }

  void plan_backup(const Arena& arena, Restore restore, const Allocation& allocation, Block& block, DeviceWork& work)
      REQUIRES(core_.map.mutex) {
    ContentBlock content;
    content.tag = arena.key().tag;
    content.base = allocation.address;
    content.block = &block;
    content.live = live_extents(allocation, block, dead_);
    content.to_file = restore == Restore::file;
    const std::size_t live = sum_of(content.live);
    content_bytes_ += live;
    if (content.to_file) {
      file_bytes_ += beyond(block.expected_for(live), block.file.bytes);
    } else if (core_.backups.shared() != nullptr) {
      // What it takes shows only while it is saved: other processes may have this content.
    } else if (const std::size_t bytes = beyond(block.expected_for(live), sum_of(block.host))) {
      host_bytes_[&core_.backups.pool_of(work.device)] += bytes;
    }
    work.blocks.push_back(std::move(content));
  }

  void run() REQUIRES(core_.backups.operation_mutex) override {
    for (auto& [pool, bytes] : host_bytes_) pool->check(bytes);
    if (file_bytes_ > 0) core_.backups.files().check(file_bytes_);
    give_up_damaged();
    std::vector<std::unique_ptr<HostPool::Urgent>> urgent;
    for (auto& [pool, bytes] : host_bytes_) {
      urgent.push_back(std::make_unique<HostPool::Urgent>(*pool));
      pool->start_growth(bytes);
    }
    core_.progress.begin(kind_, content_bytes_);
    for (auto& [index, device] : devices_) {
      core_.driver->synchronize(index);
      device.sort();
    }
    try {
      drop_all();
    } catch (const Error&) {
      undo();
      throw;
    }
    core_.stacks.give_back();
    core_.backups.prepare_packing_later();
    const Lock lock(core_.map.mutex);
    if (core_.map.unprepared_bytes() == 0) core_.backups.trim_excess();
  }

  void drop_all() REQUIRES(core_.backups.operation_mutex) {
    on_each_device([&](DeviceWork& device) REQUIRES(core_.backups.operation_mutex) {
      if (device.kept.empty()) return;
      std::vector<ChunkRange> ranges;
      for (const auto& planned : device.kept) {
        ranges.push_back({planned.arena->key().tag, planned.chunk.address, planned.chunk.bytes});
      }
      const auto drop_kept = [&](std::size_t i) { drop(device, device.kept[i]); };
      device.seconds = core_.backups.pipeline_of(device.device).save(device.blocks, ranges, drop_kept);
    });
    // Last, on every device: until one of these is gone, undo() undoes everything.
    on_each_device([&](DeviceWork& device) {
      const Stopwatch watch(device.seconds.driver);
      for (const auto& planned : device.others) drop(device, planned);
    });
  }

  // When this throws, the chunk is as it was, or unmapped with its handle an orphan.
  void drop(DeviceWork& device, const DeviceWork::PlannedChunk& planned) EXCLUDES(core_.map.mutex) {
    core_.physical.drop(*planned.arena, planned.chunk, planned.restore);
    device.done_bytes[planned.arena->key().tag] += planned.chunk.bytes;
    if (device.freed_bytes < kFirstMemory) device.first_memory_seconds = seconds();
    device.freed_bytes += planned.chunk.bytes;
  }

  // Brings back what a failed release has dropped, so that the engine can go on: all of it, unless content that is not
  // kept is gone already. What cannot be brought back stays released with its backups.
  void undo() REQUIRES(core_.backups.operation_mutex) EXCLUDES(core_.map.mutex) {
    if (!core_.driver->loss().empty() || lost_content()) return;
    auto planned = std::exchange(devices_, {});
    const ScopeExit at_end([&] { devices_ = std::move(planned); });  // errors name the tags and bytes of the release
    content_bytes_ = 0;
    try {
      {
        const Lock lock(core_.map.mutex);
        for (Arena* const arena : arenas_) {
          const auto device = planned.find(arena->key().device);
          if (device != planned.end()) plan_return(*arena, dropped(*arena, device->second.kept));
        }
      }
      bring_back(false);
    } catch (const std::exception& error) {
      warn(std::string("a release failed, and what it had released stays so until it is resumed: ") + error.what());
    }
  }

  // Whether some content that is not kept is gone.
  [[nodiscard]] bool lost_content() const EXCLUDES(core_.map.mutex) {
    const Lock lock(core_.map.mutex);
    return std::any_of(devices_.begin(), devices_.end(), [](const auto& each) {
      const auto& others = each.second.others;
      return std::any_of(others.begin(), others.end(), [](const auto& planned) {
        return !planned.arena->is_mapped(planned.chunk.address, planned.chunk.bytes);
      });
    });
  }

  // What live allocations of an arena lost with those of `chunks` that were dropped.
  [[nodiscard]] static std::vector<RangeSet::Range> dropped(const Arena& arena,
                                                            const std::vector<DeviceWork::PlannedChunk>& chunks) {
    RangeSet lost;
    const auto runs = arena.released_runs();
    for (const auto& [owner, chunk, restore] : chunks) {
      if (owner != &arena) continue;
      for (const auto& run : runs) {
        const Address from = std::max(run.begin, chunk.address);
        const Address to = std::min(run.begin + run.bytes, chunk.address + chunk.bytes);
        if (from < to) lost.add(from, to - from);
      }
    }
    std::vector<RangeSet::Range> ranges;
    for (const auto& [begin, bytes] : lost.ranges()) ranges.push_back({begin, bytes});
    return ranges;
  }

  // Drops the backups of released content that a resume could not restore, if this release overrides its policy with
  // discard or zero; otherwise the tag would stay released for ever. Intact backups stay, whatever the override.
  void give_up_damaged() EXCLUDES(core_.map.mutex) {
    const Lock lock(core_.map.mutex);
    for (Arena* const arena : arenas_) {
      const auto changed = overrides_.find(arena->key().tag);
      if (changed == overrides_.end() || keeps_content(changed->second)) continue;
      if (!arena->damaged()) continue;
      for (auto& [address, allocation] : arena->allocations()) {
        for (auto& block : allocation.blocks) {
          if (arena->is_mapped(address + block.offset, block.bytes)) continue;
          core_.backups.give_back(block, arena->key().device);
        }
      }
      arena->owe(changed->second);
    }
  }

  const std::vector<RangeSet::Range>& dead_;
  const std::map<std::string, Restore>& overrides_;
  // What the backups need beyond what their blocks own.
  std::map<HostPool*, std::size_t> host_bytes_;
  std::size_t file_bytes_ = 0;
};

}  // namespace

OperationResult release(Core& core, const MemoryMap::Tags& tags, const std::vector<RangeSet::Range>& dead,
                        const std::map<std::string, Restore>& overrides) {
  return Release(core, dead, overrides).perform(tags);
}

}  // namespace memsaver
