// Bringing memory back, at the same addresses, with the content that is owed.

#include <utility>

#include "support/error.hpp"
#include "vmm/saver.hpp"

namespace memsaver {

// All that is released in the arena comes back, in few large chunks. Only with mutex_ held.
void Saver::plan_resume(Arena& arena, Operation& operation) {
  const auto runs = arena.released_runs();
  if (runs.empty()) return;
  DeviceWork& work = operation.on(arena.key().device);
  bool kept = false;
  for (auto& [address, allocation] : arena.allocations()) {
    for (auto& block : allocation.blocks) {
      if (block.kept == Kept::nothing || arena.is_mapped(address + block.offset, block.bytes)) continue;
      kept = true;
      ContentBlock content;
      content.tag = arena.key().tag;
      content.base = address;
      content.block = &block;
      operation.content_bytes += block.content_bytes();
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

OperationResult Saver::resume(const Tags& tags) {
  const auto plan = [this](Arena& arena, Operation& operation) { plan_resume(arena, operation); };
  return operate(Progress::Operation::resume, tags, plan, [&](Operation& operation) {
    for (auto& [index, device] : operation.devices) {
      const std::size_t needed = device.bytes();
      const MemoryInfo memory = driver_->memory_info(index);
      if (needed > memory.free_bytes) {
        throw Error(ErrorKind::out_of_device_memory, "the device has too little free memory to resume")
            .with_device(index)
            .with_memory(needed, memory.free_bytes)
            .with_advice("everything stays released with its backup; let other processes free memory and repeat");
      }
      device.sort();
    }
    progress_.begin(operation.kind, operation.content_bytes);
    // Undone, on failure, while the arenas are still busy: no other call may take the ranges meanwhile.
    struct Undo {
      Operation& operation;
      ~Undo() {
        for (auto& [index, device] : operation.devices) device.transaction.rollback();
      }
    };
    const Undo undo{operation};
    operation.on_each_device([this](DeviceWork& device) {
      auto chunks = device.kept;
      chunks.insert(chunks.end(), device.others.begin(), device.others.end());
      std::vector<ChunkRange> ranges;
      for (const auto& owned : chunks) {
        ranges.push_back(
            {owned.arena->key().tag, owned.chunk.address, owned.chunk.bytes, owned.restore == Restore::zero});
      }
      const auto bring_back = [&](std::size_t i) {
        const auto& [arena, chunk, owed] = chunks[i];
        device.acquired.push_back({arena, acquire(arena->key(), chunk.address, chunk.bytes, device.transaction), owed});
      };
      device.seconds = pipeline_of(device.device).restore(device.blocks, ranges, bring_back, verify());
    });
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [index, device] : operation.devices) {
        for (const auto& owned : device.acquired) {
          owned.arena->add_chunk(owned.chunk);
          device.done_bytes[owned.arena->key().tag] += owned.chunk.bytes;
        }
      }
    }
    for (auto& [index, device] : operation.devices) device.transaction.commit();
    if (!operation.devices.empty()) retain();
  });
}

Verify Saver::verify() const {
  switch (settings_.verify) {
    case VerifyChoice::off:
      return Verify::off;
    case VerifyChoice::sampled:
      return Verify::sampled;
    case VerifyChoice::full:
      return Verify::full;
    case VerifyChoice::automatic:
      break;
  }
  return driver_->digest_is_cheap() ? Verify::full : Verify::sampled;
}

}  // namespace memsaver
