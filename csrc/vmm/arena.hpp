#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "backup/block.hpp"
#include "driver/driver.hpp"
#include "support/range_set.hpp"

namespace memsaver {

// What resume owes to content.
enum class Restore { discard, zero, host, file };
[[nodiscard]] const char* name_of(Restore restore) noexcept;
[[nodiscard]] inline bool keeps_content(Restore restore) {
  return restore == Restore::host || restore == Restore::file;
}

// One physical handle and the range that it backs. It may span allocations, and an allocation may span chunks.
struct Chunk {
  Address address;
  std::size_t bytes;
  Handle handle;
};

// What was asked for: its address never changes while it lives.
struct Allocation {
  Address address;
  std::size_t bytes;
  std::vector<Block> blocks;  // what is kept of it, in order; empty until something is to be kept
  bool in_operation = false;  // the operation that its arena is busy with works on it
  bool dying = false;         // it was freed meanwhile
};

// The address space of one device, tag and policy, and the account of what is where in it. It calls no driver and
// takes no lock: its saver does both. Every address of its spans is in exactly one of these: a live allocation, a free
// range with memory (inside a chunk that another allocation still needs), a free range without, or a range on its way
// from one to the other that only its saver knows.
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
    bool mapped;  // memory is behind it already
  };

  explicit Arena(Key key) : key_(std::move(key)) {}

  [[nodiscard]] const Key& key() const { return key_; }
  [[nodiscard]] bool owns(Address address) const;
  void add_span(Address address, std::size_t bytes);

  // Takes a free range: one that has memory where there is one (unless busy), else one without. Nothing where no free
  // range is large enough.
  [[nodiscard]] std::optional<Place> take(std::size_t bytes);
  // Gives a range without memory back.
  void reclaim(Address address, std::size_t bytes) { unmapped_.add(address, bytes); }

  void add_allocation(Address address, std::size_t bytes);
  // Forgets an allocation. Chunks that no live allocation needs any more are taken out of the account and returned:
  // unmap them, then reclaim() each (or put it back by keep_chunk). Host and file space of its blocks is the caller's.
  std::vector<Chunk> remove_allocation(Address address);

  void add_chunk(const Chunk& chunk);
  // A chunk lost its memory: free ranges inside it have none any more, and live ones are owed what `restore` says.
  void drop_chunk(Address address, Restore restore);
  // Divides what is allocated into blocks, where that was not done yet. No chunk ever begins or ends inside of one: a
  // block has memory or has none, and what was written to a part that a failed release left is never mixed with what
  // was kept of the rest.
  void make_blocks();
  // A chunk that no live allocation needs stays mapped after all; its range is free, with memory.
  void keep_chunk(const Chunk& chunk);
  // A free range without memory is not to be had until it is reclaimed.
  void withhold(Address address, std::size_t bytes) { unmapped_.remove(address, bytes); }
  // All that is released now is owed what `restore` says, and nothing else.
  void owe(Restore restore);
  // Whether the last resume found content that it could not bring back.
  [[nodiscard]] bool damaged() const;

  [[nodiscard]] std::map<Address, Allocation>& allocations() { return allocations_; }
  [[nodiscard]] const std::map<Address, Allocation>& allocations() const { return allocations_; }
  [[nodiscard]] const std::map<Address, Chunk>& chunks() const { return chunks_; }

  // The longest runs of live addresses without memory, in address order.
  [[nodiscard]] std::vector<RangeSet::Range> released_runs() const;
  // Ranges that shall each get a chunk of their own, to back this one, which has no memory: 64 MiB first, so that a
  // release gives its first memory back after about 1.2 ms of copying, then doubling up to 1 GiB, because the
  // driver's cost goes with the number of handles (on an H200 about 9 us create + 21 us access + 15 us unmap + 13 us
  // release each; 64 GiB take 64 ms to map in handles of 32 MiB and 4 ms in handles of 1 GiB) and larger ones gain
  // nothing that shows beside the copy. None ends inside of a block.
  [[nodiscard]] std::vector<RangeSet::Range> in_chunks(RangeSet::Range range) const;
  // Whether some of the range was released under `restore` and has had no memory since.
  [[nodiscard]] bool owes(Restore restore, Address address, std::size_t bytes) const;
  [[nodiscard]] bool is_mapped(Address address, std::size_t bytes) const;
  [[nodiscard]] std::size_t live_bytes() const { return live_; }
  [[nodiscard]] std::size_t mapped_bytes() const;
  // Mapped bytes that no live allocation uses.
  [[nodiscard]] std::size_t retained_bytes() const { return mapped_.total_bytes(); }
  // What keeping all that is live in host memory would take beyond what its blocks own there.
  [[nodiscard]] std::size_t unprepared_bytes() const;

  // An operation works on this arena, on what is allocated in it now: from here to its end, frees of those allocations
  // wait, and new ones take fresh ranges.
  void begin_operation();
  // Returns the allocations whose frees have waited.
  [[nodiscard]] std::vector<Address> end_operation();
  [[nodiscard]] bool busy() const { return busy_; }
  // Whether there is an allocation that nobody has freed yet.
  [[nodiscard]] bool alive(Address address) const;
  // Whether a free of the allocation has to wait, and then shall.
  [[nodiscard]] bool defer_free(Address address);

  // What is wrong with this account, in words; empty where every address is in exactly one place, and every live one
  // either has memory or is owed what one policy says. `refused`: ranges that the driver did not unmap. Only while
  // nothing else uses the arena.
  [[nodiscard]] std::vector<std::string> audit(const RangeSet& refused) const;
  // The spans of addresses that it was given.
  [[nodiscard]] const std::map<Address, std::size_t>& spans() const { return spans_; }

 private:
  [[nodiscard]] bool needed(const Chunk& chunk) const;
  void settle_debts(Address address, std::size_t bytes);
  [[nodiscard]] Address block_boundary(Address address) const;

  const Key key_;
  bool busy_ = false;
  std::vector<Address> dying_;
  std::map<Address, std::size_t> spans_;
  RangeSet mapped_;
  RangeSet unmapped_;
  std::map<Restore, RangeSet> owed_;  // by the policy under which it was released; may hold free addresses too
  std::map<Address, Allocation> allocations_;
  std::map<Address, Chunk> chunks_;
  std::size_t live_ = 0;
};

}  // namespace memsaver
