#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "support/digest.hpp"
#include "support/sizes.hpp"

namespace memsaver {

// The unit of digest, backup and copy: a part of one allocation. A block ends with its allocation, so freeing an
// allocation never leaves half a backup. 32 MiB is the smallest copy that runs at the link's full speed.
inline constexpr std::size_t kBlockBytes = 32 * kSizeUnit;

// A part of an allocation that holds content.
struct Extent {
  std::size_t offset;  // in the allocation
  std::size_t bytes;
  friend bool operator==(const Extent& a, const Extent& b) { return a.offset == b.offset && a.bytes == b.bytes; }
};

// A part of pinned host memory, within one registered slice.
struct HostRange {
  std::uintptr_t address;
  std::size_t bytes;
};

// A part of the backup file.
struct FileRange {
  std::uint64_t offset = 0;
  std::size_t bytes = 0;
};

// Bytes of extents or ranges, all together.
template <typename Range>
[[nodiscard]] std::size_t sum_of(const std::vector<Range>& ranges) {
  std::size_t sum = 0;
  for (const auto& range : ranges) sum += range.bytes;
  return sum;
}

enum class Kept {
  nothing,  // there is no backup: a resume owes no content
  zero,     // the content is all zeros
  host,     // in `host`
  file,     // in `file`
};

// What is kept of one block. It stays valid after a resume, until the content is seen to differ at a later release.
struct Block {
  std::size_t offset = 0;  // in its allocation
  std::size_t bytes = 0;
  Kept kept = Kept::nothing;
  bool has_digest = false;
  bool damaged = false;         // the last resume could not restore it
  Digest digest;                // of `extents`, words counted from the start of the allocation
  std::vector<Extent> extents;  // what was content when it was kept
  std::vector<HostRange> host;  // memory that this block owns in the pool, valid content or not
  FileRange file;               // file space that this block owns, valid content or not

  [[nodiscard]] std::size_t content_bytes() const { return sum_of(extents); }
};

}  // namespace memsaver
