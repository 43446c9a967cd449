#include "vmm/arena.hpp"

#include <algorithm>
#include <iterator>

#include "support/sizes.hpp"

namespace memsaver {

bool Arena::owns(Address address) const {
  const auto after = spans_.upper_bound(address);
  return after != spans_.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

void Arena::add_span(Address address, std::size_t bytes) {
  spans_.emplace(address, bytes);
  unmapped_.add(address, bytes);
}

std::optional<Arena::Place> Arena::take(std::size_t bytes) {
  const auto mapped = busy_ ? std::nullopt : mapped_.take(bytes);
  const auto address = mapped ? mapped : unmapped_.take(bytes);
  return address ? std::optional(Place{*address, mapped.has_value()}) : std::nullopt;
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

bool Arena::alive(Address address) const {
  const auto found = allocations_.find(address);
  return found != allocations_.end() && !found->second.dying;
}

bool Arena::defer_free(Address address) {
  Allocation& allocation = allocations_.at(address);
  if (!busy_ || !allocation.in_operation) return false;
  dying_.push_back(address);
  allocation.dying = true;
  return true;
}

void Arena::add_allocation(Address address, std::size_t bytes) {
  allocations_.emplace(address, Allocation{address, bytes, {}, false, false});
  live_ += bytes;
}

bool Arena::needed(const Chunk& chunk) const {
  const auto after = allocations_.lower_bound(chunk.address + chunk.bytes);
  return after != allocations_.begin() && std::prev(after)->first + std::prev(after)->second.bytes > chunk.address;
}

const Allocation* Arena::allocation_around(Address address, std::size_t bytes) const {
  auto found = allocations_.upper_bound(address);
  if (found == allocations_.begin()) return nullptr;
  const Allocation& allocation = (--found)->second;
  return address + bytes <= allocation.address + allocation.bytes ? &allocation : nullptr;
}

std::vector<Chunk> Arena::remove_allocation(Address address) {
  const auto found = allocations_.find(address);
  const Address end = address + found->second.bytes;
  settle_debts(address, found->second.bytes);
  allocations_.erase(found);
  live_ -= end - address;

  std::vector<Chunk> unneeded;
  Address at = address;  // accounted for up to here
  auto chunk = chunk_at(address);
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

std::map<Address, Chunk>::const_iterator Arena::chunk_at(Address address) const {
  auto chunk = chunks_.upper_bound(address);
  if (chunk == chunks_.begin()) return chunk;
  const auto before = std::prev(chunk);
  return before->first + before->second.bytes > address ? before : chunk;
}

void Arena::add_chunk(const Chunk& chunk) {
  chunks_.emplace(chunk.address, chunk);
  settle_debts(chunk.address, chunk.bytes);
}

void Arena::settle_debts(Address address, std::size_t bytes) {
  for (auto& [restore, ranges] : owed_) ranges.remove(address, bytes);
}

bool Arena::owes(Restore restore, Address address, std::size_t bytes) const {
  const auto ranges = owed_.find(restore);
  return ranges != owed_.end() && ranges->second.overlaps(address, bytes);
}

std::set<Restore> Arena::owed() const {
  std::set<Restore> policies;
  const RangeSet runs = released();
  for (const auto& [begin, bytes] : runs.ranges()) {
    for (const auto& [restore, ranges] : owed_) {
      if (ranges.overlaps(begin, bytes)) policies.insert(restore);
    }
  }
  return policies;
}

void Arena::drop_chunk(Address address, Restore restore) {
  const auto found = chunks_.find(address);
  const Chunk chunk = found->second;
  chunks_.erase(found);
  owed_[restore].add(chunk.address, chunk.bytes);
  for (const auto& hole : mapped_.remove(chunk.address, chunk.bytes)) {
    unmapped_.add(hole.begin, hole.bytes);
    settle_debts(hole.begin, hole.bytes);
  }
}

void Arena::keep_chunk(const Chunk& chunk) {
  chunks_.emplace(chunk.address, chunk);
  mapped_.add(chunk.address, chunk.bytes);
}

RangeSet Arena::released() const {
  RangeSet runs;
  for (const auto& [address, allocation] : allocations_) {
    const Address end = address + allocation.bytes;
    Address at = address;
    for (auto chunk = chunk_at(address); chunk != chunks_.end() && chunk->first < end; ++chunk) {
      if (at < chunk->first) runs.add(at, chunk->first - at);
      at = chunk->first + chunk->second.bytes;
    }
    if (at < end) runs.add(at, end - at);
  }
  return runs;
}

// The beginning of the block around this address, or the address itself if there is none.
Address Arena::block_boundary(Address address) const {
  const Allocation* const allocation = allocation_around(address, 1);
  if (allocation == nullptr) return address;
  const auto& blocks = allocation->blocks;
  const std::size_t offset = address - allocation->address;
  const auto block = std::partition_point(blocks.begin(), blocks.end(),
                                          [&](const auto& each) { return each.offset + each.bytes <= offset; });
  return block == blocks.end() ? address : allocation->address + block->offset;
}

std::vector<RangeSet::Range> Arena::in_chunks(RangeSet::Range range) const {
  constexpr std::size_t first = 64 * kSizeUnit;
  constexpr std::size_t largest = 1024 * kSizeUnit;
  static_assert(first > kBlockBytes, "or a chunk could be empty");
  std::vector<RangeSet::Range> chunks;
  for (std::size_t size = first; range.bytes > 0; size = std::min(2 * size, largest)) {
    std::size_t bytes = range.bytes;
    if (size < bytes) bytes = block_boundary(range.begin + size) - range.begin;
    chunks.push_back({range.begin, bytes});
    range.begin += bytes;
    range.bytes -= bytes;
  }
  return chunks;
}

void Arena::make_blocks() {
  for (auto& [address, allocation] : allocations_) {
    if (!allocation.blocks.empty()) continue;
    const Address end = address + allocation.bytes;
    std::vector<Address> boundaries;
    for (auto chunk = chunk_at(address); chunk != chunks_.end() && chunk->first < end; ++chunk) {
      for (const Address at : {chunk->first, chunk->first + chunk->second.bytes}) {
        if (address < at && at < end) boundaries.push_back(at);
      }
    }
    boundaries.push_back(end);
    Address at = address;
    for (const Address boundary : boundaries) {
      while (at < boundary) {
        const std::size_t whole = kBlockBytes - (at - address) % kBlockBytes;
        Block block;
        block.offset = at - address;
        block.bytes = std::min(whole, boundary - at);
        at += block.bytes;
        allocation.blocks.push_back(std::move(block));
      }
    }
  }
}

void Arena::owe(Restore restore) { owed_ = {{restore, released()}}; }

bool Arena::damaged() const {
  return std::any_of(allocations_.begin(), allocations_.end(), [](const auto& each) {
    const auto& blocks = each.second.blocks;
    return std::any_of(blocks.begin(), blocks.end(), [](const Block& block) { return block.damaged; });
  });
}

bool Arena::is_mapped(Address address, std::size_t bytes) const {
  Address at = address;
  for (auto chunk = chunk_at(at); chunk != chunks_.end() && chunk->first <= at; ++chunk) {
    at = chunk->first + chunk->second.bytes;
  }
  return at >= address + bytes;
}

std::size_t Arena::mapped_bytes() const {
  std::size_t sum = 0;
  for (const auto& [address, chunk] : chunks_) sum += chunk.bytes;
  return sum;
}

std::size_t Arena::unprepared_bytes() const {
  std::size_t sum = 0;
  for (const auto& [address, allocation] : allocations_) {
    if (allocation.blocks.empty()) sum += allocation.bytes;
    for (const auto& block : allocation.blocks) {
      if (block.host.empty() && block.kept != Kept::zero) sum += block.expected_for(block.bytes);
    }
  }
  return sum;
}

std::size_t Arena::expected_bytes(bool to_file) const {
  std::size_t sum = 0;
  for (const auto& [address, allocation] : allocations_) {
    if (allocation.blocks.empty() && is_mapped(address, allocation.bytes)) sum += allocation.bytes;
    for (const auto& block : allocation.blocks) {
      if (!is_mapped(address + block.offset, block.bytes)) continue;
      const std::size_t expected = block.expected_for(block.bytes);
      sum += expected - std::min(expected, to_file ? block.file.bytes : sum_of(block.host));
    }
  }
  return sum;
}

}  // namespace memsaver
