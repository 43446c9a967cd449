#include "support/range_set.hpp"

#include <algorithm>
#include <iterator>

namespace memsaver {

void RangeSet::add(std::uintptr_t begin, std::size_t bytes) {
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

std::vector<RangeSet::Range> RangeSet::remove(std::uintptr_t begin, std::size_t bytes) {
  std::vector<Range> removed;
  const std::uintptr_t end = begin + bytes;
  auto at = ranges_.upper_bound(begin);
  if (at != ranges_.begin()) --at;
  while (at != ranges_.end() && at->first < end) {
    const std::uintptr_t first = at->first;
    const std::uintptr_t last = first + at->second;
    if (last <= begin) {
      ++at;
      continue;
    }
    at = ranges_.erase(at);
    removed.push_back({std::max(first, begin), std::min(last, end) - std::max(first, begin)});
    total_ -= removed.back().bytes;
    if (first < begin) ranges_.emplace(first, begin - first);
    if (last > end) ranges_.emplace(end, last - end);
  }
  return removed;
}

std::optional<std::uintptr_t> RangeSet::take(std::size_t bytes) {
  auto best = ranges_.end();
  for (auto at = ranges_.begin(); at != ranges_.end(); ++at) {
    if (at->second >= bytes && (best == ranges_.end() || at->second < best->second)) best = at;
  }
  if (best == ranges_.end()) return std::nullopt;
  const std::uintptr_t begin = best->first;
  remove(begin, bytes);
  return begin;
}

std::optional<RangeSet::Range> RangeSet::take_from_largest(std::size_t bytes) {
  const auto largest = std::max_element(ranges_.begin(), ranges_.end(),
                                        [](const auto& a, const auto& b) { return a.second < b.second; });
  if (largest == ranges_.end()) return std::nullopt;
  const Range range{largest->first, std::min(bytes, largest->second)};
  remove(range.begin, range.bytes);
  return range;
}

bool RangeSet::overlaps(std::uintptr_t begin, std::size_t bytes) const {
  const auto after = ranges_.lower_bound(begin + bytes);
  return after != ranges_.begin() && std::prev(after)->first + std::prev(after)->second > begin;
}

bool RangeSet::contains(std::uintptr_t begin, std::size_t bytes) const {
  const auto after = ranges_.upper_bound(begin);
  return after != ranges_.begin() && std::prev(after)->first + std::prev(after)->second >= begin + bytes;
}

}  // namespace memsaver
