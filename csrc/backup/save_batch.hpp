#pragma once

#include <cstddef>
#include <future>
#include <optional>
#include <utility>
#include <vector>

#include "backup/packing.hpp"
#include "backup/pipeline.hpp"

namespace memsaver {

// A block to be copied.
struct ChangedBlock {
  std::size_t block;
  std::optional<Digest> digest;
  bool may_be_packed;
};

// Blocks whose copies end at one event, and the chunks that may be dropped then.
struct SaveBatch {
  struct Copied {
    std::size_t block;
    Kept kept;
    std::optional<Digest> digest;
    std::size_t packed_bytes;  // 0: not packed
    ContentBlock::Outcome outcome;
  };
  std::vector<Copied> copied;
  std::vector<std::pair<ChangedBlock, PackPlan>> awaited;  // another process is writing them
  std::vector<std::shared_future<void>> writes;
  std::optional<Event> event;
  std::vector<std::size_t> chunks;
};

// A block that is being packed.
struct PackedBlock {
  ChangedBlock changed;
  Packing::Buffer* buffer;
};

}  // namespace memsaver
