// Giving memory back, content kept as the policies say.

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/sizes.hpp"
#include "support/stopwatch.hpp"
#include "vmm/saver.hpp"

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

// By how much more room has to be found than is given back for it.
std::size_t beyond(std::size_t needed, std::size_t owned) { return needed > owned ? needed - owned : 0; }

}  // namespace

// What the backups of a release need beyond what their blocks own.
struct Saver::BackupRoom {
  std::map<HostPool*, std::size_t> host_bytes;
  std::size_t file_bytes = 0;
};

// All that is mapped in the arena goes, its content kept as `restore` says. Only with mutex_ held.
void Saver::plan_release(Arena& arena, Restore restore, const std::vector<RangeSet::Range>& dead, Operation& operation,
                         BackupRoom& room) {
  if (arena.chunks().empty()) return;
  const int device = arena.key().device;
  DeviceWork& work = operation.on(device);
  for (const auto& [address, chunk] : arena.chunks()) {
    (keeps_content(restore) ? work.kept : work.others).push_back({&arena, chunk, restore});
  }
  if (keeps_content(restore)) arena.make_blocks();
  for (auto& [address, allocation] : arena.allocations()) {
    for (auto& block : allocation.blocks) {
      if (!arena.is_mapped(address + block.offset, block.bytes)) continue;
      if (!keeps_content(restore)) {
        // What was kept of content that is here again says nothing about what is discarded now.
        give_backup_back(block, device);
        continue;
      }
      ContentBlock content;
      content.tag = arena.key().tag;
      content.base = address;
      content.block = &block;
      content.live = live_extents(allocation, block, dead);
      content.to_file = restore == Restore::file;
      const std::size_t live = sum_of(content.live);
      operation.content_bytes += live;
      if (content.to_file) {
        room.file_bytes += beyond(to_pages(live), block.file.bytes);
      } else if (const std::size_t bytes = beyond(to_pages(live), sum_of(block.host))) {
        room.host_bytes[&pool_of(device)] += bytes;
      }
      work.blocks.push_back(std::move(content));
    }
  }
}

OperationResult Saver::release(const Tags& tags, const std::vector<RangeSet::Range>& dead,
                               const std::map<std::string, Restore>& overrides) {
  BackupRoom room;
  const auto plan = [&](Arena& arena, Operation& operation) {
    const auto override_ = overrides.find(arena.key().tag);
    const Restore restore = override_ != overrides.end() ? override_->second : arena.key().restore;
    plan_release(arena, restore, dead, operation, room);
  };
  return operate(Progress::Operation::release, tags, plan, [&](Operation& operation) {
    for (auto& [pool, bytes] : room.host_bytes) pool->check(bytes);
    if (room.file_bytes > 0) files_.check(room.file_bytes);
    give_up_damaged(operation, overrides);
    std::vector<std::unique_ptr<HostPool::Urgent>> urgent;
    for (auto& [pool, bytes] : room.host_bytes) {
      urgent.push_back(std::make_unique<HostPool::Urgent>(*pool));
      pool->start_growth(bytes);
    }
    progress_.begin(operation.kind, operation.content_bytes);
    for (auto& [index, device] : operation.devices) {
      driver_->synchronize(index);
      device.sort();
    }
    const auto give_up = [&](DeviceWork& device, const DeviceWork::Owned& owned) {
      drop(*owned.arena, owned.chunk, owned.restore);
      device.done_bytes[owned.arena->key().tag] += owned.chunk.bytes;
      if (device.freed_bytes < kFirstMemory) device.first_memory_seconds = operation.seconds();
      device.freed_bytes += owned.chunk.bytes;
    };
    operation.on_each_device([&](DeviceWork& device) {
      if (device.kept.empty()) return;
      std::vector<ChunkRange> ranges;
      for (const auto& owned : device.kept) {
        ranges.push_back({owned.arena->key().tag, owned.chunk.address, owned.chunk.bytes});
      }
      device.seconds = pipeline_of(device.device).save(device.blocks, ranges, [&](std::size_t i) {
        give_up(device, device.kept[i]);
      });
    });
    // Last, on every device: until one of these is gone, a resume undoes everything.
    operation.on_each_device([&](DeviceWork& device) {
      const Stopwatch watch(device.seconds.driver);
      for (const auto& owned : device.others) give_up(device, owned);
    });
  });
}

// Where a resume could not bring content back, and a later release says to discard it or to fill it with zeros, none
// of it is kept any longer: without that the tag would stay released for ever. What can be brought back stays, whatever
// a later release says.
void Saver::give_up_damaged(Operation& operation, const std::map<std::string, Restore>& overrides) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Arena* arena : operation.arenas) {
    const auto override_ = overrides.find(arena->key().tag);
    if (override_ == overrides.end() || keeps_content(override_->second)) continue;
    if (!arena->damaged()) continue;
    for (auto& [address, allocation] : arena->allocations()) {
      for (auto& block : allocation.blocks) {
        if (!arena->is_mapped(address + block.offset, block.bytes)) give_backup_back(block, arena->key().device);
      }
    }
    arena->owe(override_->second);
  }
}

// Gives up one chunk: what its live ranges are owed from then on is `restore`. When this throws the chunk is as it was,
// or unmapped with its memory an orphan.
void Saver::drop(Arena& arena, const Chunk& chunk, Restore restore) {
  const int device = arena.key().device;
  try {
    driver_->unmap(device, chunk.address, chunk.bytes);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      arena.drop_chunk(chunk.address, restore);
    }
    try {
      driver_->release(device, chunk.handle, chunk.bytes);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      orphans_.push_back({device, chunk.handle, chunk.bytes});
      throw;
    }
  } catch (Error& error) {
    throw error.with_tag(arena.key().tag).with_device(device).with_bytes(chunk.bytes);
  }
}

}  // namespace memsaver
