#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>

#include "backup/packing.hpp"
#include "backup/pipeline.hpp"

namespace memsaver {

// Which blocks may be packed, of one save; asked for each of them, in its order. The first ones of each tag stay as
// they are: a release takes memory for packing where they were, and a resume unpacks by way of theirs.
class RawFirst {
 public:
  [[nodiscard]] bool may_be_packed(const ContentBlock& content) {
    std::size_t& before = seen_bytes_[{content.tag, content.to_file}];
    const bool allowed =
        before >= Packing::kBytes && content.live.size() == 1 && content.live.front().bytes >= Packing::kSmallest;
    before += content.block->bytes;
    return allowed;
  }

 private:
  std::map<std::pair<std::string, bool>, std::size_t> seen_bytes_;  // of blocks so far, by tag and kind of backup
};

}  // namespace memsaver
