#include <cstddef>
#include <vector>

#include "backup/pipeline.hpp"
#include "backup/raw_first.hpp"
#include "support/sizes.hpp"

namespace memsaver {

void Pipeline::expect(std::vector<ContentBlock>& blocks) {
  Packing& packing = staging_.packing();
  if (!packing.packs()) return;
  RawFirst raw_first(blocks);
  std::vector<PackItem> items;
  std::vector<Block*> sampled;
  for (const auto& content : blocks) {
    if (!raw_first.may_be_packed(content) || content.block->kept != Kept::nothing) continue;
    items.push_back(content.first_run());
    sampled.push_back(content.block);
  }
  try {
    const std::vector<PackEstimate> expected = packing.plan(items, staging_.kernels());
    for (std::size_t i = 0; i < sampled.size(); ++i) {
      sampled[i]->expected_bytes = round_up(expected[i].bytes, kBlockBytes / 128);
    }
  } catch (...) {
    FileTransfers none;
    staging_.settle(none);
    throw;
  }
}

}  // namespace memsaver
