#include "vmm/arena.hpp"

#include <algorithm>
#include <iterator>

#include "support/sizes.hpp"

namespace memsaver {

void Arena::add_span(Address address, std::size_t bytes) {
  spans_.add(address, bytes);
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
  return std::exchange(deferred_frees_, {});
}

bool Arena::alive(Address address) const {
  const auto found = allocations_.find(address);
  return found != allocations_.end() && !found->second.freed;
}

bool Arena::defer_free(Address address) {
  Allocation& allocation = allocations_.at(address);
  if (!busy_ || !allocation.in_operation) return false;
  deferred_frees_.push_back(address);
  allocation.freed = true;
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
  const std::size_t bytes = found->second.bytes;
  clear_released_under(address, bytes);
  allocations_.erase(found);
  live_ -= bytes;
  std::vector<Chunk> unneeded;
  for_each_part(address, bytes, [&](Address begin, Address end, const Chunk* chunk) {
    if (chunk == nullptr) {
      unmapped_.add(begin, end - begin);
    } else if (needed(*chunk)) {
      mapped_.add(begin, end - begin);
    } else {
      mapped_.remove(chunk->address, chunk->bytes);
      unneeded.push_back(*chunk);
      chunks_.erase(unneeded.back().address);
    }
  });
  return unneeded;
}

template <typename Visit>
void Arena::for_each_part(Address address, std::size_t bytes, const Visit& visit) const {
  const Address end = address + bytes;
  auto next = chunks_.upper_bound(address);
  if (next != chunks_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address) --next;
  Address at = address;  // visited up to here
  while (next != chunks_.end() && next->first < end) {
    const Chunk& chunk = (next++)->second;
    const Address first = std::max(at, chunk.address);
    const Address last = std::min(end, chunk.address + chunk.bytes);
    if (at < first) visit(at, first, nullptr);
    visit(first, last, &chunk);
    at = last;
  }
  if (at < end) visit(at, end, nullptr);
}

void Arena::add_chunk(const Chunk& chunk) {
  chunks_.emplace(chunk.address, chunk);
  clear_released_under(chunk.address, chunk.bytes);
}

void Arena::clear_released_under(Address address, std::size_t bytes) {
  for (auto& [restore, ranges] : released_under_) ranges.remove(address, bytes);
}

bool Arena::released_under(Restore restore, Address address, std::size_t bytes) const {
  const auto ranges = released_under_.find(restore);
  return ranges != released_under_.end() && ranges->second.overlaps(address, bytes);
}

std::set<Restore> Arena::release_policies() const {
  std::set<Restore> policies;
  const RangeSet runs = released();
  for (const auto& [begin, bytes] : runs.ranges()) {
    for (const auto& [restore, ranges] : released_under_) {
      if (ranges.overlaps(begin, bytes)) policies.insert(restore);
    }
  }
  return policies;
}

void Arena::drop_chunk(Address address, Restore restore) {
  const auto found = chunks_.find(address);
  const Chunk chunk = found->second;
  chunks_.erase(found);
  released_under_[restore].add(chunk.address, chunk.bytes);
  for (const auto& hole : mapped_.remove(chunk.address, chunk.bytes)) {
    unmapped_.add(hole.begin, hole.bytes);
    clear_released_under(hole.begin, hole.bytes);
  }
}

void Arena::keep_chunk(const Chunk& chunk) {
  chunks_.emplace(chunk.address, chunk);
  mapped_.add(chunk.address, chunk.bytes);
}

RangeSet Arena::released() const {
  RangeSet runs;
  for (const auto& [address, allocation] : allocations_) {
    for_each_part(address, allocation.bytes, [&](Address begin, Address end, const Chunk* chunk) {
      if (chunk == nullptr) runs.add(begin, end - begin);
    });
  }
  return runs;
}

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
    const auto divide = [begin = address, &blocks = allocation.blocks](Address at, Address end, const Chunk*) {
      while (at < end) {
        const std::size_t whole = kBlockBytes - (at - begin) % kBlockBytes;
        Block block;
        block.offset = at - begin;
        block.bytes = std::min(whole, end - at);
        at += block.bytes;
        blocks.push_back(std::move(block));
      }
    };
    for_each_part(address, allocation.bytes, divide);
  }
}

bool Arena::damaged() const {
  return std::any_of(allocations_.begin(), allocations_.end(), [](const auto& each) {
    const auto& blocks = each.second.blocks;
    return std::any_of(blocks.begin(), blocks.end(), [](const Block& block) { return block.damaged; });
  });
}

bool Arena::is_mapped(Address address, std::size_t bytes) const {
  bool mapped = true;
  for_each_part(address, bytes, [&](Address, Address, const Chunk* chunk) { mapped = mapped && chunk != nullptr; });
  return mapped;
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
