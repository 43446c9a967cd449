#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
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
  void add(std::uintptr_t begin, std::size_t bytes) {
    if (bytes == 0) return;
    total_ += bytes;
    auto after = ranges_.lower_bound(begin);
    if (after != ranges_.end() && begin + bytes == after->first) {
      bytes += after->second;
      after = ranges_.erase(after);
    }
    if (after != ranges_.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == begin) {
        before->second += bytes;
        return;
      }
    }
    ranges_.emplace_hint(after, begin, bytes);
  }
  // Removes the parts of the set within [begin, begin + bytes), and returns them.
  std::vector<Range> remove(std::uintptr_t begin, std::size_t bytes) {
    std::vector<Range> removed;
    const std::uintptr_t end = begin + bytes;
    auto at = ranges_.upper_bound(begin);
    if (at != ranges_.begin() && std::prev(at)->first + std::prev(at)->second > begin) --at;
    while (at != ranges_.end() && at->first < end) {
      const std::uintptr_t first = at->first;
      const std::uintptr_t last = first + at->second;
      at = ranges_.erase(at);
      removed.push_back({std::max(first, begin), std::min(last, end) - std::max(first, begin)});
      total_ -= removed.back().bytes;
      if (first < begin) ranges_.emplace(first, begin - first);
      if (last > end) ranges_.emplace(end, last - end);
    }
    return removed;
  }
  // Removes `bytes` from the smallest range that has room, the lowest of equals, and returns where they began, if any.
  [[nodiscard]] std::optional<std::uintptr_t> take(std::size_t bytes) {
    auto best = ranges_.end();
    for (auto at = ranges_.begin(); at != ranges_.end(); ++at) {
      if (at->second >= bytes && (best == ranges_.end() || at->second < best->second)) best = at;
    }
    if (best == ranges_.end()) return std::nullopt;
    const std::uintptr_t begin = best->first;
    remove(begin, bytes);
    return begin;
  }
  // Removes up to `bytes` from the largest range, and returns them; nothing if the set is empty.
  [[nodiscard]] std::optional<Range> take_from_largest(std::size_t bytes) {
    const auto largest = std::max_element(ranges_.begin(), ranges_.end(),
                                          [](const auto& a, const auto& b) { return a.second < b.second; });
    if (largest == ranges_.end()) return std::nullopt;
    const Range range{largest->first, std::min(bytes, largest->second)};
    remove(range.begin, range.bytes);
    return range;
  }

  // Returns whether all of [begin, begin + bytes) is in the set.
  [[nodiscard]] bool contains(std::uintptr_t begin, std::size_t bytes) const {
    const auto after = ranges_.upper_bound(begin);
    return after != ranges_.begin() && std::prev(after)->first + std::prev(after)->second >= begin + bytes;
  }
  // Returns whether any part of [begin, begin + bytes) is in the set.
  [[nodiscard]] bool overlaps(std::uintptr_t begin, std::size_t bytes) const {
    const auto after = ranges_.lower_bound(begin + bytes);
    return after != ranges_.begin() && std::prev(after)->first + std::prev(after)->second > begin;
  }
  [[nodiscard]] std::size_t total_bytes() const noexcept { return total_; }
  [[nodiscard]] const std::map<std::uintptr_t, std::size_t>& ranges() const noexcept { return ranges_; }

 private:
  std::map<std::uintptr_t, std::size_t> ranges_;  // begin -> bytes
  std::size_t total_ = 0;
};

}  // namespace memsaver
