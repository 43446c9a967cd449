#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace memsaver {

// Owns disjoint ranges of numbers (addresses, offsets); neighbours are merged. One thread at a time.
class RangeSet {
 public:
  struct Range {
    std::uintptr_t begin;
    std::size_t bytes;
  };

  // Adds a range that overlaps none in the set.
  void add(std::uintptr_t begin, std::size_t bytes);
  // Removes the parts of the set within [begin, begin + bytes), and returns them.
  std::vector<Range> remove(std::uintptr_t begin, std::size_t bytes);
  // Removes `bytes` from the smallest range that holds them, the lowest of equals. Returns where they begin; nothing if
  // no range holds them.
  [[nodiscard]] std::optional<std::uintptr_t> take(std::size_t bytes);
  // Removes up to `bytes` from the largest range, and returns them; nothing if the set is empty.
  [[nodiscard]] std::optional<Range> take_from_largest(std::size_t bytes);

  // Returns whether all of [begin, begin + bytes) is in the set.
  [[nodiscard]] bool contains(std::uintptr_t begin, std::size_t bytes) const;
  // Returns whether any part of [begin, begin + bytes) is in the set.
  [[nodiscard]] bool overlaps(std::uintptr_t begin, std::size_t bytes) const;
  [[nodiscard]] std::size_t total_bytes() const noexcept { return total_; }
  [[nodiscard]] const std::map<std::uintptr_t, std::size_t>& ranges() const noexcept { return ranges_; }

 private:
  std::map<std::uintptr_t, std::size_t> ranges_;  // begin -> bytes
  std::size_t total_ = 0;
};

}  // namespace memsaver
