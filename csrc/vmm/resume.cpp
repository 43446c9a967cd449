#include <algorithm>
#include <optional>
#include <utility>

#include "support/error.hpp"
#include "support/scope_exit.hpp"
#include "vmm/operation.hpp"

namespace memsaver {

void Operation::plan_return(Arena& arena, const std::vector<RangeSet::Range>& runs) {
  if (runs.empty()) return;
  RangeSet wanted;
  for (const auto& run : runs) wanted.add(run.begin, run.bytes);
  DeviceWork& work = on(arena.key().device);
  bool kept = false;
  for (auto& [address, allocation] : arena.allocations()) {
    for (auto& block : allocation.blocks) {
      if (block.kept == Kept::nothing || !wanted.contains(address + block.offset, block.bytes)) continue;
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

void Operation::bring_back(bool map_first) {
  for (auto& [index, device] : devices_) device.sort();
  core_.progress.begin(kind_, content_bytes_);
  // On failure, undo while the arenas are still busy: no other call may take the ranges meanwhile.
  const ScopeExit undo([this] {
    for (auto& [index, device] : devices_) device.transaction.rollback();
  });
  on_each_device([&](DeviceWork& device) REQUIRES(core_.backups.operation_mutex) { bring_back(device, map_first); });
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
}

// Maps the chunks of one device and restores their content. When this throws, `device.transaction` undoes it.
void Operation::bring_back(DeviceWork& device, bool map_first) {
  auto chunks = device.kept;
  chunks.insert(chunks.end(), device.others.begin(), device.others.end());
  std::vector<ChunkRange> ranges;
  for (const auto& planned : chunks) {
    ranges.push_back(
        {planned.arena->key().tag, planned.chunk.address, planned.chunk.bytes, planned.restore == Restore::zero});
  }
  const auto acquire = [&](std::size_t i) {
    const auto& [arena, chunk, owed] = chunks[i];
    const auto& key = arena->key();
    const auto reserved =
        kind_ == Progress::Operation::resume ? core_.reservation.take(key.device, chunk.bytes) : std::nullopt;
    const Chunk acquired = core_.physical.acquire(key, chunk.address, chunk.bytes, device.transaction, reserved);
    device.acquired.push_back({arena, acquired, owed});
  };
  for (std::size_t i = 0; map_first && i < ranges.size(); ++i) acquire(i);
  const auto acquire_next = [&](std::size_t i) {
    if (!map_first) acquire(i);
  };
  Pipeline& pipeline = core_.backups.pipeline_of(device.device);
  device.seconds = pipeline.restore(device.blocks, ranges, acquire_next, core_.backups.verify(), map_first);
}

namespace {

class Resume : public Operation {
 public:
  explicit Resume(Core& core) : Operation(core, Progress::Operation::resume) {}

 protected:
  void plan(Arena& arena) REQUIRES(core_.backups.operation_mutex, core_.map.mutex) override {
    plan_return(arena, arena.released_runs());
  }

  // Throws ErrorKind::out_of_device_memory if a device has less free memory than this resume needs.
  void check_room() {
    for (const auto& [index, device] : devices_) core_.stacks.take_back(index);
    auto reserved = core_.reservation.bytes_by_device();
    for (auto& [index, device] : devices_) {
      const std::size_t needed = device.bytes() - std::min(device.bytes(), reserved[index]);
      const MemoryInfo memory = core_.driver->memory_info(index);
      if (needed <= memory.free_bytes) continue;
      throw Error(ErrorKind::out_of_device_memory, "the device has too little free memory to resume")
          .with_device(index)
          .with_memory(needed, memory.free_bytes)
          .with_advice("everything stays released with its backup; let other processes free memory and repeat");
    }
  }

  void run() REQUIRES(core_.backups.operation_mutex) override {
    const ScopeExit unused([this] { give_back_reserved(core_); });
    check_room();
    // Memory for transfers must not take what chunks need.
    bring_back(core_.driver->in_host_memory() && core_.backups.short_of_room(bytes()));
    if (!devices_.empty()) core_.backups.retain();
  }
};

class Reserve final : public Resume {
 public:
  using Resume::Resume;

 private:
  void run() REQUIRES(core_.backups.operation_mutex) override {
    core_.reservation.give_back();
    try {
      check_room();
      for (auto& [index, device] : devices_) add(device);
    } catch (...) {
      give_back_reserved(core_);
      throw;
    }
  }

  void add(const DeviceWork& device) {
    for (const auto* const list : {&device.kept, &device.others}) {
      for (const auto& planned : *list) {
        try {
          core_.reservation.add(device.device, planned.chunk.bytes);
        } catch (Error& error) {
          add_free_memory(error, *core_.driver, device.device, planned.chunk.bytes);
          throw error.with_tag(planned.arena->key().tag).with_device(device.device).with_bytes(planned.chunk.bytes);
        }
      }
    }
  }
};

}  // namespace

OperationResult resume(Core& core, const MemoryMap::Tags& tags) { return Resume(core).perform(tags); }

void give_back_reserved(Core& core) noexcept {
  core.reservation.give_back();
  core.stacks.give_back();
}

void reserve(Core& core, const MemoryMap::Tags& tags) { (void)Reserve(core).perform(tags); }

}  // namespace memsaver
