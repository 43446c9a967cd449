#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "backup/packing.hpp"
#include "backup/pipeline.hpp"
#include "support/sizes.hpp"

namespace memsaver {

// Which blocks may be packed, of one save; asked for each of them, in its order. The first ones of each tag stay as
// they are: a release takes memory for packing where they were, and a resume unpacks by way of theirs. A tag for which
// that would be more than an eighth makes do with two buffers.
class RawFirst {
 public:
  explicit RawFirst(const std::vector<ContentBlock>& blocks) {
    for (const auto& content : blocks) tags_[key(content)].bytes += content.block->bytes;
  }

  [[nodiscard]] bool may_be_packed(const ContentBlock& content) {
    Tag& tag = tags_[key(content)];
    const std::size_t raw = tag.bytes < 8 * Packing::kBytes ? kLeast : Packing::kBytes;
    const bool allowed =
        tag.seen_bytes >= raw && content.live.size() == 1 && content.live.front().bytes >= Packing::kSmallest;
    tag.seen_bytes += content.block->bytes;
    return allowed;
  }

 private:
  // The first chunk of a tag, and the first window of a save.
  static constexpr std::size_t kLeast = 64 * kSizeUnit;
  static_assert(kLeast >= 2 * Packing::kBufferBytes);

  struct Tag {
    std::size_t bytes = 0;       // of all its blocks
    std::size_t seen_bytes = 0;  // of those that were asked for
  };
  using Key = std::pair<std::string, bool>;  // the tag, and the kind of backup
  [[nodiscard]] static Key key(const ContentBlock& content) { return {content.tag, content.to_file}; }

  std::map<Key, Tag> tags_;
};

}  // namespace memsaver
