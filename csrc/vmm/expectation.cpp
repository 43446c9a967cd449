#include "support/log.hpp"
#include "vmm/operation.hpp"

namespace memsaver {

namespace {

// Samples resident content of policy `host` that has no backup yet. Moves nothing.
class Expectation final : public Operation {
 public:
  explicit Expectation(Core& core) : Operation(core, Progress::Operation::none) {}

 private:
  void plan(Arena& arena) REQUIRES(core_.backups.operation_mutex, core_.map.mutex) override {
    if (arena.key().restore != Restore::host || arena.chunks().empty()) return;
    arena.make_blocks();
    DeviceWork& work = on(arena.key().device);
    for (const auto& [address, chunk] : arena.chunks()) work.kept.push_back({&arena, chunk, Restore::host});
    for (auto& [address, allocation] : arena.allocations()) {
      for (auto& block : allocation.blocks) {
        if (!arena.is_mapped(address + block.offset, block.bytes)) continue;
        ContentBlock content;
        content.tag = arena.key().tag;
        content.base = address;
        content.block = &block;
        content.live = {{block.offset, block.bytes}};
        work.blocks.push_back(std::move(content));
      }
    }
  }

  void run() REQUIRES(core_.backups.operation_mutex) override {
    for (auto& [index, device] : devices_) {
      device.sort();
      core_.backups.pipeline_of(index).expect(device.blocks);
    }
  }
};

}  // namespace

void expect_backups(Core& core) {
  try {
    (void)Expectation(core).perform({});
  } catch (const Error& error) {
    if (error.kind == ErrorKind::context_lost) throw;
    warn(std::string("host memory is prepared for content as it is: ") + error.what());
  }
}

}  // namespace memsaver
