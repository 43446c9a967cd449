#pragma once

#include "support/digest.hpp"
#include "support/host_memory.hpp"
#include "support/system.hpp"

namespace memsaver {

// The largest block, the unit of digest, backup and copy: 32 MiB is the smallest copy at the link's full speed. A block
// never spans two allocations, so freeing one leaves no partial backup.
inline const std::size_t kBlockBytes = 32 * kSizeUnit;

// Returns how much memory to take for packed content: rounded up, so that content that packs to a little more or less
// after a change keeps its memory.
[[nodiscard]] inline std::size_t round_packed(std::size_t bytes) { return round_up(bytes, kBlockBytes / 128); }

// A part of an allocation that holds content, or of the backup file.
struct Extent {
  std::size_t offset = 0;  // in the allocation or the file
  std::size_t bytes = 0;
  friend bool operator==(const Extent& a, const Extent& b) { return a.offset == b.offset && a.bytes == b.bytes; }
};

// Pinned host memory within one registered slice.
struct HostRange {
  std::uintptr_t address;
  std::size_t bytes;
};

template <typename Range>
[[nodiscard]] std::size_t sum_of(const std::vector<Range>& ranges) {
  std::size_t sum = 0;
  for (const auto& range : ranges) sum += range.bytes;
  return sum;
}

// Fills what `ranges` have beyond `bytes`, less than a page, with zeros.
inline void zero_rest(const std::vector<HostRange>& ranges, std::size_t bytes) {
  const std::size_t rest = sum_of(ranges) - bytes;
  if (rest > 0) std::memset(reinterpret_cast<char*>(ranges.back().address + ranges.back().bytes - rest), 0, rest);
}

// Calls `visit(offset, memory, bytes)` for each run of content that is contiguous in its allocation, at `offset`, and
// in `ranges`, at `memory`. The ranges hold the extents one after the other.
template <typename Visit>
void for_each_piece(const std::vector<Extent>& extents, const std::vector<HostRange>& ranges, const Visit& visit) {
  auto range = ranges.begin();
  std::size_t used = 0;
  for (const auto& extent : extents) {
    for (std::size_t done = 0, bytes = 0; done < extent.bytes; done += bytes, used += bytes) {
      if (used == range->bytes) {
        ++range;
        used = 0;
      }
      bytes = std::min(extent.bytes - done, range->bytes - used);
      visit(extent.offset + done, range->address + used, bytes);
    }
  }
}

// Copies `extents` of an allocation's content, which lies at `content`, to `ranges` of host memory.
inline void copy_to_ranges(const void* content, const std::vector<Extent>& extents,
                           const std::vector<HostRange>& ranges) {
  for_each_piece(extents, ranges, [&](std::size_t offset, std::uintptr_t memory, std::size_t bytes) {
    std::memcpy(reinterpret_cast<void*>(memory), static_cast<const char*>(content) + offset, bytes);
  });
}

// Copies the bytes [begin, end) of what `from` holds to the same place in `to`, which is at least as large.
inline void copy_part(const std::vector<HostRange>& from, const std::vector<HostRange>& to, std::size_t begin,
                      std::size_t end) {
  std::vector<Extent> extents;
  for (const auto& range : from) extents.push_back({range.address, range.bytes});
  std::size_t at = 0;
  for_each_piece(extents, to, [&](std::uintptr_t source, std::uintptr_t target, std::size_t bytes) {
    const std::size_t first = std::clamp(begin, at, at + bytes) - at;
    const std::size_t last = std::clamp(end, at, at + bytes) - at;
    std::memcpy(reinterpret_cast<void*>(target + first), reinterpret_cast<const void*>(source + first), last - first);
    at += bytes;
  });
}

enum class Kept {
  nothing,  // no backup
  zero,     // the content is all zeros
  host,     // in `host`
  file,     // in `file`
};

// The backup of a block. It stays valid after a resume, until a later release finds that the content differs.
struct Block {
  std::size_t offset = 0;  // in its allocation
  std::size_t bytes = 0;
  Kept kept = Kept::nothing;
  bool damaged = false;                 // the last resume could not restore it
  std::optional<Digest> digest;         // of `extents`, words counted from the start of the allocation
  std::vector<Extent> extents;          // the content when it was saved
  bool adopted = false;                 // no content is ever outside of `extents`
  std::vector<HostRange> host;          // owned by this block, with or without valid content
  std::optional<std::uint32_t> shared;  // the shared store's entry that has `host`, if not the pool
  Extent file;                          // owned by this block, with or without valid content
  std::size_t packed_bytes = 0;         // of what is kept in `host` or `file`, if it is packed
  std::size_t expected_bytes = 0;       // what the next backup will take if it can be packed; 0: as much as the content

  [[nodiscard]] std::size_t content_bytes() const { return sum_of(extents); }
  [[nodiscard]] bool has_memory() const { return !host.empty() || file.bytes != 0; }
  // Returns what a backup of `content` bytes is expected to take in host memory or in the file.
  [[nodiscard]] std::size_t expected_for(std::size_t content) const {
    return expected_bytes == 0 ? to_pages(content) : std::min(to_pages(expected_bytes), to_pages(content));
  }
  [[nodiscard]] std::size_t kept_bytes() const {
    return kept == Kept::host ? sum_of(host) : kept == Kept::file ? file.bytes : 0;
  }
};

}  // namespace memsaver
