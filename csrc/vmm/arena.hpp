#pragma once

#include <tuple>

#include "vmm/settings.hpp"

namespace memsaver {

// One physical handle and the range that it backs. It may span allocations, and an allocation may span chunks.
struct Chunk {
  Address address;
  std::size_t bytes;
  Handle handle;
};

struct Allocation {
  Address address;
  std::size_t bytes;
  std::vector<Block> blocks;  // in order; empty until its content is first to be kept
  bool in_operation = false;  // the operation under way on its arena works on it
  bool freed = false;         // during that operation; removed at its end
};

// Owns the account of what is where in the address space of one device, tag, restore policy and chunk size. Calls no
// driver and takes no lock; the mutex of its MemoryMap guards it. Every address of its spans is in exactly one of: a
// live allocation; a free range with memory (in a chunk that another allocation needs); a free range without memory; a
// range that a caller has taken out, to map or unmap it. A live address without memory is either released, and a resume
// brings it back, or shrunk, and only a resize does.
class Arena {
 public:
  struct Key {
    int device;
    std::string tag;
    Restore restore;
    // The size of the largest chunk, whose multiples in an allocation no chunk crosses; 0: in_chunks() chooses sizes.
    std::size_t chunk_bytes = 0;
    friend bool operator<(const Key& a, const Key& b) {
      return std::tie(a.device, a.tag, a.restore, a.chunk_bytes) < std::tie(b.device, b.tag, b.restore, b.chunk_bytes);
    }
  };
  struct Place {
    Address address;
    bool mapped;  // it has memory already
  };

  explicit Arena(Key key) : key_(std::move(key)) {}

  [[nodiscard]] const Key& key() const { return key_; }
  [[nodiscard]] bool owns(Address address) const { return spans_.contains(address, 1); }
  // Adds reserved addresses, free and without memory.
  void add_span(Address address, std::size_t bytes) {
    spans_.add(address, bytes);
    unmapped_.add(address, bytes);
  }
  [[nodiscard]] const std::map<Address, std::size_t>& spans() const { return spans_.ranges(); }

  // Takes out a free range, preferably one with memory; only one without if `bare` or the arena is busy. Returns
  // nothing if none is large enough.
  [[nodiscard]] std::optional<Place> take(std::size_t bytes, bool bare = false) {
    const auto mapped = busy_ || bare ? std::nullopt : mapped_.take(bytes);
    const auto address = mapped ? mapped : unmapped_.take(bytes);
    return address ? std::optional(Place{*address, mapped.has_value()}) : std::nullopt;
  }
  // Puts a range without memory back.
  void reclaim(Address address, std::size_t bytes) { unmapped_.add(address, bytes); }
  // Takes out this free range without memory until it is reclaimed.
  void withhold(Address address, std::size_t bytes) { unmapped_.remove(address, bytes); }

  void add_allocation(Address address, std::size_t bytes) {
    allocations_.emplace(address, Allocation{address, bytes, {}, false, false});
    live_.add(address, bytes);
  }
  // Adds a released one, whose backup is `blocks`.
  void add_released(Address address, std::size_t bytes, std::vector<Block> blocks) {
    add_allocation(address, bytes);
    allocations_.at(address).blocks = std::move(blocks);
    released_under_[key_.restore].add(address, bytes);
  }
  // Removes an allocation whose backups the caller has given back. Takes the chunks that no live allocation needs any
  // more out of the account and returns them: unmap them, then reclaim() or keep_chunk() each.
  std::vector<Chunk> remove_allocation(Address address) {
    const auto found = allocations_.find(address);
    const std::size_t bytes = found->second.bytes;
    forget_loss(address, bytes);
    allocations_.erase(found);
    live_.remove(address, bytes);
    std::vector<Chunk> unneeded;
    for_each_part(address, bytes, [&](Address begin, Address end, const Chunk* chunk) {
      if (chunk == nullptr) {
        unmapped_.add(begin, end - begin);
      } else if (live_.overlaps(chunk->address, chunk->bytes)) {
        mapped_.add(begin, end - begin);
      } else {
        mapped_.remove(chunk->address, chunk->bytes);
        unneeded.push_back(*chunk);
        chunks_.erase(unneeded.back().address);
      }
    });
    return unneeded;
  }
  // Returns the allocation that holds all of the range, or null.
  [[nodiscard]] const Allocation* allocation_around(Address address, std::size_t bytes) const {
    auto found = allocations_.upper_bound(address);
    if (found == allocations_.begin()) return nullptr;
    const Allocation& allocation = (--found)->second;
    return address + bytes <= allocation.address + allocation.bytes ? &allocation : nullptr;
  }
  // Returns whether an allocation begins here that has not been freed.
  [[nodiscard]] bool alive(Address address) const {
    const auto found = allocations_.find(address);
    return found != allocations_.end() && !found->second.freed;
  }

  // Notes that a range has memory again; neither a resume nor a resize need restore anything there any more.
  void add_chunk(const Chunk& chunk) {
    chunks_.emplace(chunk.address, chunk);
    forget_loss(chunk.address, chunk.bytes);
  }
  // Notes that a chunk lost its memory: a resume must restore its live ranges as `restore` says; without it they are
  // shrunk.
  void drop_chunk(Address address, std::optional<Restore> restore) {
    const auto found = chunks_.find(address);
    const Chunk chunk = found->second;
    chunks_.erase(found);
    (restore ? released_under_[*restore] : shrunk_).add(chunk.address, chunk.bytes);
    for (const auto& hole : mapped_.remove(chunk.address, chunk.bytes)) {
      unmapped_.add(hole.begin, hole.bytes);
      forget_loss(hole.begin, hole.bytes);
    }
  }
  // Puts back a chunk that no live allocation needs and that stays mapped: its range is free, with memory.
  void keep_chunk(const Chunk& chunk) {
    chunks_.emplace(chunk.address, chunk);
    mapped_.add(chunk.address, chunk.bytes);
  }

  // Divides allocations that have no blocks yet into blocks. No chunk and nothing shrunk begins or ends inside a block,
  // so a block is mapped or released as a whole and never mixes content written after a failed release with its backup.
  void make_blocks() {
    for (auto& [address, allocation] : allocations_) {
      if (!allocation.blocks.empty()) continue;
      const auto divide = [this, begin = address, &blocks = allocation.blocks](Address at, Address end, const Chunk*) {
        while (at < end) {
          const std::size_t offset = at - begin;
          std::size_t whole = kBlockBytes - offset % kBlockBytes;
          if (key_.chunk_bytes != 0) whole = std::min(whole, key_.chunk_bytes - offset % key_.chunk_bytes);
          Block block;
          block.offset = at - begin;
          block.bytes = std::min(whole, shrunk_edge(at, end) - at);
          at += block.bytes;
          blocks.push_back(std::move(block));
        }
      };
      for_each_part(address, allocation.bytes, divide);
    }
  }
  // Returns ranges, each for one chunk, that cover `range`, which has no memory: 64 MiB first, so that a release gives
  // its first memory back after about 1.2 ms of copying, then doubling to 1 GiB. The driver's cost grows with the
  // number of handles (H200: about 9 us create + 21 us access + 15 us unmap + 13 us release each): 64 GiB are mapped in
  // 64 ms in handles of 32 MiB, in 4 ms in handles of 1 GiB. Larger ones bring nothing: the copies hide the cost. A
  // chunk size in the key overrides this.
  [[nodiscard]] std::vector<RangeSet::Range> in_chunks(RangeSet::Range range) const {
    const std::size_t first = 64 * kSizeUnit;  // more than a block, or a chunk could be empty
    const std::size_t largest = 1024 * kSizeUnit;
    std::vector<RangeSet::Range> chunks;
    for (std::size_t size = first; range.bytes > 0; size = std::min(2 * size, largest)) {
      std::size_t bytes = range.bytes;
      if (key_.chunk_bytes != 0) {
        bytes = own_chunk(range);
      } else if (size < bytes) {
        bytes = block_boundary(range.begin + size) - range.begin;
      }
      chunks.push_back({range.begin, bytes});
      range.begin += bytes;
      range.bytes -= bytes;
    }
    return chunks;
  }

  // Notes that a resume must restore all that is released now as `restore` says.
  void set_released_under(Restore restore) { released_under_ = {{restore, released()}}; }
  // Returns whether a range that has no memory must be zeros when it has memory again.
  [[nodiscard]] bool comes_back_zero(Address address, std::size_t bytes) const {
    const auto zero = released_under_.find(Restore::zero);
    return (zero != released_under_.end() && zero->second.overlaps(address, bytes)) || shrunk_.overlaps(address, bytes);
  }
  // Returns the policies under which what is released now was released.
  [[nodiscard]] std::set<Restore> release_policies() const {
    std::set<Restore> policies;
    const RangeSet runs = released();
    for (const auto& [begin, bytes] : runs.ranges()) {
      for (const auto& [restore, ranges] : released_under_) {
        if (ranges.overlaps(begin, bytes)) policies.insert(restore);
      }
    }
    return policies;
  }

  // Returns the blocks of all allocations, each with the address of its allocation.
  [[nodiscard]] std::vector<std::pair<Address, Block*>> blocks() {
    std::vector<std::pair<Address, Block*>> all;
    for (auto& [address, allocation] : allocations_) {
      for (auto& block : allocation.blocks) all.emplace_back(address, &block);
    }
    return all;
  }
  [[nodiscard]] std::map<Address, Allocation>& allocations() { return allocations_; }
  [[nodiscard]] const std::map<Address, Allocation>& allocations() const { return allocations_; }
  [[nodiscard]] const std::map<Address, Chunk>& chunks() const { return chunks_; }
  // Returns the live addresses without memory that are not shrunk.
  [[nodiscard]] RangeSet released() const {
    RangeSet runs = live_;
    for (const auto& [begin, chunk] : chunks_) runs.remove(begin, chunk.bytes);
    for (const auto& [begin, bytes] : shrunk_.ranges()) runs.remove(begin, bytes);
    return runs;
  }
  // Returns the live addresses whose memory a resize gave back.
  [[nodiscard]] const RangeSet& shrunk() const { return shrunk_; }
  // Sets what is shrunk of an arena without memory. What no longer is comes back with zeros in a resume.
  void set_shrunk(const RangeSet& ranges) {
    for (const auto& [begin, bytes] : shrunk_.ranges()) released_under_[Restore::zero].add(begin, bytes);
    for (const auto& [begin, bytes] : ranges.ranges()) forget_loss(begin, bytes);
    shrunk_ = ranges;
  }
  // Returns whether all of the range has memory.
  [[nodiscard]] bool is_mapped(Address address, std::size_t bytes) const {
    bool mapped = true;
    for_each_part(address, bytes, [&](Address, Address, const Chunk* chunk) { mapped = mapped && chunk != nullptr; });
    return mapped;
  }
  [[nodiscard]] std::size_t live_bytes() const { return live_.total_bytes(); }
  [[nodiscard]] std::size_t mapped_bytes() const {
    std::size_t sum = 0;
    for (const auto& [address, chunk] : chunks_) sum += chunk.bytes;
    return sum;
  }
  // Returns the mapped bytes that no live allocation uses.
  [[nodiscard]] std::size_t retained_bytes() const { return mapped_.total_bytes(); }
  // Returns the host memory that a backup of everything live would need beyond what its blocks own.
  [[nodiscard]] std::size_t unprepared_bytes() const {
    std::size_t sum = 0;
    for (const auto& [address, allocation] : allocations_) {
      if (allocation.blocks.empty()) sum += allocation.bytes;
      for (const auto& block : allocation.blocks) {
        if (block.host.empty() && block.kept != Kept::zero) sum += block.expected_for(block.bytes);
      }
    }
    return sum;
  }
  // Returns the host memory, or the space in files, that a backup of what is mapped is expected to need beyond what its
  // blocks own.
  [[nodiscard]] std::size_t expected_bytes(bool to_file) const {
    std::size_t sum = 0;
    for (const auto& [address, allocation] : allocations_) {
      if (allocation.blocks.empty()) {
        for_each_part(address, allocation.bytes, [&](Address begin, Address end, const Chunk* chunk) {
          if (chunk != nullptr) sum += end - begin;
        });
      }
      for (const auto& block : allocation.blocks) {
        if (!is_mapped(address + block.offset, block.bytes)) continue;
        const std::size_t expected = block.expected_for(block.bytes);
        sum += expected - std::min(expected, to_file ? block.file.bytes : sum_of(block.host));
      }
    }
    return sum;
  }

  // Marks the arena busy: until end_operation(), frees of its present allocations are deferred, and new allocations
  // take ranges without memory only.
  void begin_operation() {
    busy_ = true;
    for (auto& [address, allocation] : allocations_) allocation.in_operation = true;
  }
  // Returns the allocations whose frees were deferred.
  [[nodiscard]] std::vector<Address> end_operation() {
    busy_ = false;
    for (auto& [address, allocation] : allocations_) allocation.in_operation = false;
    return std::exchange(deferred_frees_, {});
  }
  [[nodiscard]] bool busy() const { return busy_; }
  // Defers a free if an operation works on the allocation. Returns whether it did.
  [[nodiscard]] bool defer_free(Address address) {
    Allocation& allocation = allocations_.at(address);
    if (!busy_ || !allocation.in_operation) return false;
    deferred_frees_.push_back(address);
    allocation.freed = true;
    return true;
  }

 private:
  friend struct ArenaAudit;  // of the tests
  void forget_loss(Address address, std::size_t bytes) {
    for (auto& [restore, ranges] : released_under_) ranges.remove(address, bytes);
    shrunk_.remove(address, bytes);
  }
  // Calls `visit(begin, end, chunk)` for each part of a range that lies in one chunk, or in none (null). `visit` may
  // remove that chunk.
  template <typename Visit>
  void for_each_part(Address address, std::size_t bytes, const Visit& visit) const {
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
  // Returns the first address after `at` at which something shrunk begins or ends; `end` if that is earlier.
  [[nodiscard]] Address shrunk_edge(Address at, Address end) const {
    for (const auto& [begin, bytes] : shrunk_.ranges()) {
      for (const Address edge : {begin, begin + bytes}) {
        if (edge > at) return std::min(edge, end);
      }
    }
    return end;
  }
  // Returns the bytes of the chunk at the beginning of a range, in an arena with a chunk size.
  [[nodiscard]] std::size_t own_chunk(RangeSet::Range range) const {
    const Allocation* const allocation = allocation_around(range.begin, 1);
    if (allocation == nullptr) return std::min(key_.chunk_bytes, range.bytes);  // not added yet, or removed
    const std::size_t offset = range.begin - allocation->address;
    return std::min({key_.chunk_bytes - offset % key_.chunk_bytes, allocation->bytes - offset, range.bytes});
  }
  // Returns the beginning of the block around this address, or the address itself if there is none.
  [[nodiscard]] Address block_boundary(Address address) const {
    const Allocation* const allocation = allocation_around(address, 1);
    if (allocation == nullptr) return address;
    const auto& blocks = allocation->blocks;
    const std::size_t offset = address - allocation->address;
    const auto block = std::partition_point(blocks.begin(), blocks.end(),
                                            [&](const auto& each) { return each.offset + each.bytes <= offset; });
    return block == blocks.end() ? address : allocation->address + block->offset;
  }

  const Key key_;
  bool busy_ = false;
  std::vector<Address> deferred_frees_;
  RangeSet spans_;                              // kept apart by guards, so that none are merged
  RangeSet mapped_;                             // free, with memory
  RangeSet unmapped_;                           // free, without memory
  std::map<Restore, RangeSet> released_under_;  // by the policy at that time; may include free addresses
  RangeSet live_;                               // in allocations
  RangeSet shrunk_;                             // live, and given back by a resize
  std::map<Address, Allocation> allocations_;
  std::map<Address, Chunk> chunks_;
};

}  // namespace memsaver
