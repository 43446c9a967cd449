#include "vmm/arena.hpp"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

namespace memsaver {

const char* name_of(Restore restore) noexcept {
  switch (restore) {
    case Restore::discard:
      return "discard";
    case Restore::zero:
      return "zero";
    case Restore::host:
      return "host";
    case Restore::file:
      return "file";
  }
  return "";
}

bool Arena::owns(Address address) const {
  auto span = spans_.upper_bound(address);
  if (span == spans_.begin()) return false;
  --span;
  return address < span->first + span->second;
}

void Arena::add_span(Address address, std::size_t bytes) {
  spans_.emplace(address, bytes);
  unmapped_.add(address, bytes);
}

std::optional<Arena::Place> Arena::take(std::size_t bytes) {
  if (!busy_) {
    if (const auto address = mapped_.take(bytes)) return Place{*address, true};
  }
  if (const auto address = unmapped_.take(bytes)) return Place{*address, false};
  return std::nullopt;
}

void Arena::begin_operation() {
  busy_ = true;
  for (auto& [address, allocation] : allocations_) allocation.in_operation = true;
}

std::vector<Address> Arena::end_operation() {
  busy_ = false;
  for (auto& [address, allocation] : allocations_) allocation.in_operation = false;
  return std::exchange(dying_, {});
}

bool Arena::defer_free(Address address) {
  Allocation& allocation = allocations_.at(address);
  if (!busy_ || !allocation.in_operation) return false;
  if (!allocation.dying) dying_.push_back(address);
  allocation.dying = true;
  return true;
}

void Arena::add_allocation(Address address, std::size_t bytes) {
  allocations_.emplace(address, Allocation{address, bytes, {}, false, false});
  live_ += bytes;
}

bool Arena::needed(const Chunk& chunk) const {
  auto next = allocations_.lower_bound(chunk.address);
  if (next != allocations_.end() && next->first < chunk.address + chunk.bytes) return true;
  if (next == allocations_.begin()) return false;
  --next;
  return next->first + next->second.bytes > chunk.address;
}

std::vector<Chunk> Arena::remove_allocation(Address address) {
  const auto found = allocations_.find(address);
  const Address end = address + found->second.bytes;
  allocations_.erase(found);
  live_ -= end - address;

  std::vector<Chunk> unneeded;
  Address at = address;  // the part of the range that is accounted for
  auto chunk = chunks_.upper_bound(address);
  if (chunk != chunks_.begin()) {
    const auto before = std::prev(chunk);
    if (before->first + before->second.bytes > address) chunk = before;
  }
  while (chunk != chunks_.end() && chunk->first < end) {
    const Chunk current = chunk->second;
    const Address first = std::max(at, current.address);
    const Address last = std::min(end, current.address + current.bytes);
    if (first > at) unmapped_.add(at, first - at);
    if (needed(current)) {
      mapped_.add(first, last - first);
      ++chunk;
    } else {
      mapped_.remove(current.address, current.bytes);
      unneeded.push_back(current);
      chunk = chunks_.erase(chunk);
    }
    at = last;
  }
  if (at < end) unmapped_.add(at, end - at);
  return unneeded;
}

void Arena::drop_chunk(Address address) {
  const auto found = chunks_.find(address);
  const Chunk chunk = found->second;
  chunks_.erase(found);
  std::vector<RangeSet::Range> holes;
  for (auto range = mapped_.ranges().lower_bound(chunk.address);
       range != mapped_.ranges().end() && range->first < chunk.address + chunk.bytes; ++range) {
    holes.push_back({range->first, std::min(range->second, chunk.address + chunk.bytes - range->first)});
  }
  if (auto before = mapped_.ranges().lower_bound(chunk.address); before != mapped_.ranges().begin()) {
    --before;  // a hole that begins in the chunk below
    const Address end = std::min(before->first + before->second, chunk.address + chunk.bytes);
    if (end > chunk.address) holes.push_back({chunk.address, end - chunk.address});
  }
  for (const auto& hole : holes) {
    mapped_.remove(hole.begin, hole.bytes);
    unmapped_.add(hole.begin, hole.bytes);
  }
}

void Arena::keep_chunk(const Chunk& chunk) {
  chunks_.emplace(chunk.address, chunk);
  mapped_.add(chunk.address, chunk.bytes);
}

std::vector<RangeSet::Range> Arena::released_runs() const {
  std::vector<RangeSet::Range> runs;
  const auto add = [&runs](Address begin, Address end) {
    if (begin >= end) return;
    if (!runs.empty() && runs.back().begin + runs.back().bytes == begin) {
      runs.back().bytes += end - begin;
    } else {
      runs.push_back({begin, end - begin});
    }
  };
  auto chunk = chunks_.begin();
  for (const auto& [address, allocation] : allocations_) {
    const Address end = address + allocation.bytes;
    Address at = address;
    while (chunk != chunks_.end() && chunk->first + chunk->second.bytes <= at) ++chunk;
    for (auto over = chunk; over != chunks_.end() && over->first < end; ++over) {
      add(at, std::max(at, over->first));
      at = std::max(at, over->first + over->second.bytes);
    }
    add(at, end);
  }
  return runs;
}

bool Arena::is_mapped(Address address, std::size_t bytes) const {
  Address at = address;
  auto chunk = chunks_.upper_bound(address);
  if (chunk != chunks_.begin()) --chunk;
  for (; chunk != chunks_.end() && at < address + bytes; ++chunk) {
    if (chunk->first + chunk->second.bytes <= at) continue;
    if (chunk->first > at) return false;
    at = chunk->first + chunk->second.bytes;
  }
  return at >= address + bytes;
}

std::size_t Arena::mapped_bytes() const {
  std::size_t sum = 0;
  for (const auto& [address, chunk] : chunks_) sum += chunk.bytes;
  return sum;
}

std::vector<std::size_t> chunk_sizes(std::size_t bytes) {
  constexpr std::size_t first = std::size_t{64} << 20;
  constexpr std::size_t largest = std::size_t{1} << 30;
  std::vector<std::size_t> sizes;
  for (std::size_t size = first; bytes > 0; size = std::min(2 * size, largest)) {
    sizes.push_back(std::min(size, bytes));
    bytes -= sizes.back();
  }
  return sizes;
}

}  // namespace memsaver
