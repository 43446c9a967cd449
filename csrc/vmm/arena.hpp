#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "driver/driver.hpp"
#include "support/range_set.hpp"
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

// Owns the account of what is where in the address space of one device, tag and restore policy. It calls no driver and
// takes no lock; the mutex of its MemoryMap guards it. Every address of its spans is in exactly one of: a live
// allocation; a free range with memory (in a chunk that another allocation still needs); a free range without memory;
// a range that a caller has taken out, to map or unmap it.
class Arena {
 public:
  struct Key {
    int device;
    std::string tag;
    Restore restore;
    friend bool operator<(const Key& a, const Key& b) {
      return std::tie(a.device, a.tag, a.restore) < std::tie(b.device, b.tag, b.restore);
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
  void add_span(Address address, std::size_t bytes);
  [[nodiscard]] const std::map<Address, std::size_t>& spans() const { return spans_.ranges(); }

  // Takes a free range out: one with memory if there is one and the arena is not busy, else one without. Returns
  // nothing if none is large enough.
  [[nodiscard]] std::optional<Place> take(std::size_t bytes);
  // Puts a range without memory back.
  void reclaim(Address address, std::size_t bytes) { unmapped_.add(address, bytes); }
  // Takes a particular free range without memory out, until it is reclaimed.
  void withhold(Address address, std::size_t bytes) { unmapped_.remove(address, bytes); }

  void add_allocation(Address address, std::size_t bytes);
  // Removes an allocation whose backups the caller has given back. Takes the chunks that no live allocation needs any
  // more out of the account and returns them: unmap them, then reclaim() or keep_chunk() each.
  std::vector<Chunk> remove_allocation(Address address);
  // Returns the allocation that holds all of the range, or null.
  [[nodiscard]] const Allocation* allocation_around(Address address, std::size_t bytes) const;
  // Returns whether an allocation begins here that has not been freed.
  [[nodiscard]] bool alive(Address address) const;

  // Notes that a range has memory again; a resume need restore nothing there any more.
  void add_chunk(const Chunk& chunk);
  // Notes that a chunk lost its memory: a resume must restore its live ranges as `restore` says.
  void drop_chunk(Address address, Restore restore);
  // Puts back a chunk that no live allocation needs and that stays mapped: its range is free, with memory.
  void keep_chunk(const Chunk& chunk);

  // Divides allocations that have no blocks yet into blocks. No chunk begins or ends inside a block, so a block is
  // mapped or released as a whole and never mixes content written after a failed release with its backup.
  void make_blocks();
  // Returns ranges, each for one chunk, that together cover `range`, which has no memory: 64 MiB first, so that a
  // release gives its first memory back after about 1.2 ms of copying, then doubling to 1 GiB. The driver's cost grows
  // with the number of handles (H200: about 9 us create + 21 us access + 15 us unmap + 13 us release each; mapping
  // 64 GiB takes 64 ms in handles of 32 MiB, 4 ms in handles of 1 GiB), and beyond 1 GiB the copies hide it.
  [[nodiscard]] std::vector<RangeSet::Range> in_chunks(RangeSet::Range range) const;

  // Notes that a resume must restore all that is released now as `restore` says.
  void set_released_under(Restore restore) { released_under_ = {{restore, released()}}; }
  // Returns whether some of the range was released under `restore` and has had no memory since.
  [[nodiscard]] bool released_under(Restore restore, Address address, std::size_t bytes) const;
  // Returns the policies under which what is released now was released.
  [[nodiscard]] std::set<Restore> release_policies() const;
  // Returns whether the last resume failed to restore some content from its backup.
  [[nodiscard]] bool damaged() const;

  [[nodiscard]] std::map<Address, Allocation>& allocations() { return allocations_; }
  [[nodiscard]] const std::map<Address, Allocation>& allocations() const { return allocations_; }
  [[nodiscard]] const std::map<Address, Chunk>& chunks() const { return chunks_; }
  // Returns the live addresses without memory.
  [[nodiscard]] RangeSet released() const;
  // Returns whether all of the range has memory.
  [[nodiscard]] bool is_mapped(Address address, std::size_t bytes) const;
  [[nodiscard]] std::size_t live_bytes() const { return live_; }
  [[nodiscard]] std::size_t mapped_bytes() const;
  // Returns the mapped bytes that no live allocation uses.
  [[nodiscard]] std::size_t retained_bytes() const { return mapped_.total_bytes(); }
  // Returns the host memory that a backup of everything live would need beyond what its blocks own.
  [[nodiscard]] std::size_t unprepared_bytes() const;
  // Returns the host memory, or the space in files, that a backup of what is mapped is expected to need beyond what its
  // blocks own.
  [[nodiscard]] std::size_t expected_bytes(bool to_file) const;

  // Marks the arena busy: until end_operation(), frees of its present allocations are deferred, and new allocations
  // take ranges without memory only.
  void begin_operation();
  // Returns the allocations whose frees were deferred.
  [[nodiscard]] std::vector<Address> end_operation();
  [[nodiscard]] bool busy() const { return busy_; }
  // Defers a free if an operation works on the allocation. Returns whether it did.
  [[nodiscard]] bool defer_free(Address address);

 private:
  friend struct ArenaAudit;  // of the tests
  [[nodiscard]] bool needed(const Chunk& chunk) const;
  void clear_released_under(Address address, std::size_t bytes);
  // Calls `visit(begin, end, chunk)` for each part of a range that lies in one chunk, or in none (null). It may remove
  // that chunk.
  template <typename Visit>
  void for_each_part(Address address, std::size_t bytes, const Visit& visit) const;
  // Returns the beginning of the block around this address, or the address itself if there is none.
  [[nodiscard]] Address block_boundary(Address address) const;

  const Key key_;
  bool busy_ = false;
  std::vector<Address> deferred_frees_;
  RangeSet spans_;                              // kept apart by guards, so that none are merged
  RangeSet mapped_;                             // free, with memory
  RangeSet unmapped_;                           // free, without memory
  std::map<Restore, RangeSet> released_under_;  // by the policy at that time; may include free addresses
  std::map<Address, Allocation> allocations_;
  std::map<Address, Chunk> chunks_;
  std::size_t live_ = 0;
};

}  // namespace memsaver
