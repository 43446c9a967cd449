#include <utility>

#include "support/error.hpp"
#include "support/scope_exit.hpp"
#include "vmm/operation.hpp"

namespace memsaver {

namespace {

class Resume final : public Operation {
 public:
  explicit Resume(Core& core) : Operation(core, Progress::Operation::resume) {}

 private:
  void plan(Arena& arena) REQUIRES(core_.backups.operation_mutex, core_.map.mutex) override {
    const auto runs = arena.released_runs();
    if (runs.empty()) return;
    DeviceWork& work = on(arena.key().device);
    bool kept = false;
    for (auto& [address, allocation] : arena.allocations()) {
      for (auto& block : allocation.blocks) {
        if (block.kept == Kept::nothing || arena.is_mapped(address + block.offset, block.bytes)) continue;
        kept = true;
        ContentBlock content;
        content.tag = arena.key().tag;
        content.base = address;
        content.block = &block;
        content_bytes_ += block.content_bytes();
        work.blocks.push_back(std::move(content));
      }
    }
    for (const auto& run : runs) {
      for (const auto& [at, bytes] : arena.in_chunks(run)) {
        const Restore owed = arena.owes(Restore::zero, at, bytes) ? Restore::zero : Restore::discard;
        (kept ? work.kept : work.others).push_back({&arena, {at, bytes, Handle{}}, owed});
      }
    }
  }

  // Throws ErrorKind::out_of_device_memory if a device has less free memory than this resume needs.
  void check_room() REQUIRES(core_.backups.operation_mutex) {
    for (auto& [index, device] : devices_) {
      const std::size_t needed = device.bytes();
      const MemoryInfo memory = core_.driver->memory_info(index);
      if (needed <= memory.free_bytes) continue;
      throw Error(ErrorKind::out_of_device_memory, "the device has too little free memory to resume")
          .with_device(index)
          .with_memory(needed, memory.free_bytes)
          .with_advice("everything stays released with its backup; let other processes free memory and repeat");
    }
    map_first_ = core_.driver->in_host_memory() && core_.backups.short_of_room(bytes());
  }

  void run() REQUIRES(core_.backups.operation_mutex) override {
    check_room();
    for (auto& [index, device] : devices_) device.sort();
    core_.progress.begin(kind_, content_bytes_);
    // On failure, undo while the arenas are still busy: no other call may take the ranges meanwhile.
    const ScopeExit undo([this] {
      for (auto& [index, device] : devices_) device.transaction.rollback();
    });
    on_each_device([this](DeviceWork& device) REQUIRES(core_.backups.operation_mutex) { restore(device); });
    {
      const Lock lock(core_.map.mutex);
      for (auto& [index, device] : devices_) {
        for (const auto& planned : device.acquired) {
          planned.arena->add_chunk(planned.chunk);
          device.done_bytes[planned.arena->key().tag] += planned.chunk.bytes;
        }
      }
    }
    for (auto& [index, device] : devices_) device.transaction.commit();
    if (!devices_.empty()) core_.backups.retain();
  }

  // Maps the chunks of one device and restores their content. When this throws, `device.transaction` undoes it.
  void restore(DeviceWork& device) REQUIRES(core_.backups.operation_mutex) EXCLUDES(core_.map.mutex) {
    auto chunks = device.kept;
    chunks.insert(chunks.end(), device.others.begin(), device.others.end());
    std::vector<ChunkRange> ranges;
    for (const auto& planned : chunks) {
      ranges.push_back(
          {planned.arena->key().tag, planned.chunk.address, planned.chunk.bytes, planned.restore == Restore::zero});
    }
    const auto acquire = [&](std::size_t i) {
      const auto& [arena, chunk, owed] = chunks[i];
      const Chunk acquired = core_.physical.acquire(arena->key(), chunk.address, chunk.bytes, device.transaction);
      device.acquired.push_back({arena, acquired, owed});
    };
    for (std::size_t i = 0; map_first_ && i < ranges.size(); ++i) acquire(i);
    const auto acquire_next = [&](std::size_t i) {
      if (!map_first_) acquire(i);
    };
    Pipeline& pipeline = core_.backups.pipeline_of(device.device);
    device.seconds = pipeline.restore(device.blocks, ranges, acquire_next, core_.backups.verify());
  }

  bool map_first_ = false;  // memory for transfers must not take what chunks need
};

}  // namespace

OperationResult resume(Core& core, const MemoryMap::Tags& tags) { return Resume(core).perform(tags); }

}  // namespace memsaver
