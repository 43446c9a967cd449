// Checks an arena's account of itself, for tests.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>

#include "vmm/arena.hpp"

namespace memsaver {

struct Arena::Audit {
  static constexpr std::size_t kPage = 4096;  // no driver maps less at once

  const Arena& arena;
  std::vector<std::string> problems = {};

  void problem(const char* what, Address address, std::size_t bytes) {
    char text[160];
    std::snprintf(text, sizeof text, "tag '%s', %s: %s [0x%zx, +%zu]", arena.key_.tag.c_str(),
                  name_of(arena.key_.restore), what, static_cast<std::size_t>(address), bytes);
    problems.emplace_back(text);
  }

  // Live and free ranges tile the spans.
  void check_spans(const RangeSet& refused) {
    std::map<Address, std::size_t> tiles;
    std::size_t live = 0;
    for (const auto& [address, allocation] : arena.allocations_) {
      tiles.emplace(address, allocation.bytes);
      live += allocation.bytes;
    }
    for (const RangeSet* set : {&arena.mapped_, &arena.unmapped_, &refused}) {
      for (const auto& [address, bytes] : set->ranges()) {
        if (!tiles.emplace(address, bytes).second) problem("an address is both free and in use", address, bytes);
      }
    }
    if (live != arena.live_) problem("live bytes are miscounted", arena.live_, live);
    auto tile = tiles.begin();
    for (const auto& [address, bytes] : arena.spans_) {
      Address at = address;
      while (tile != tiles.end() && tile->first == at && at < address + bytes) {
        at += tile->second;
        ++tile;
      }
      if (at != address + bytes) problem("a span is not tiled by live and free ranges", at, 0);
    }
    if (tile != tiles.end()) problem("a range is outside all spans", tile->first, tile->second);
  }

  // Chunks lie in spans and do not overlap; free ranges have memory exactly if they are listed with memory.
  void check_chunks() {
    Address end = 0;
    for (const auto& [address, chunk] : arena.chunks_) {
      if (address != chunk.address || address < end) problem("chunks overlap", address, chunk.bytes);
      if (!arena.owns(address) || !arena.owns(address + chunk.bytes - 1)) {
        problem("a chunk is outside", address, chunk.bytes);
      }
      end = address + chunk.bytes;
      if (arena.unmapped_.overlaps(address, chunk.bytes)) {
        problem("a free range listed without memory has memory", address, chunk.bytes);
      }
      for (const auto& [restore, ranges] : arena.owed_) {
        if (ranges.overlaps(address, chunk.bytes)) problem("content is owed where memory is", address, chunk.bytes);
      }
    }
    for (const auto& [address, bytes] : arena.mapped_.ranges()) {
      if (!arena.is_mapped(address, bytes)) problem("a free range listed with memory has none", address, bytes);
    }
  }

  // Each live range without memory is owed what exactly one policy says.
  void check_debts() {
    for (const auto& run : arena.released_runs()) {
      std::size_t owed = 0;
      for (Address at = run.begin; at < run.begin + run.bytes; at += kPage) {
        for (const auto& [restore, ranges] : arena.owed_) owed += ranges.contains(at, kPage) ? kPage : 0;
      }
      if (owed != run.bytes) problem("a released range is not owed what one policy says", run.begin, run.bytes);
    }
  }

  // Content that is owed is kept.
  void check_kept(const Allocation& allocation) {
    const auto kept_at = [&](Address at) {
      for (const auto& block : allocation.blocks) {
        const Address begin = allocation.address + block.offset;
        if (at >= begin && at < begin + block.bytes) return block.kept;
      }
      return Kept::nothing;
    };
    for (Address at = allocation.address; at < allocation.address + allocation.bytes; at += kPage) {
      const bool content = arena.owes(Restore::host, at, kPage) || arena.owes(Restore::file, at, kPage);
      if (content && kept_at(at) == Kept::nothing) problem("content that is owed is not kept", at, kPage);
    }
  }

  // No chunk begins or ends inside a block, and a block has room for its content.
  void check_block(const Block& block, Address begin) {
    const auto inside = [&](Address at) { return begin < at && at < begin + block.bytes; };
    for (const auto& [address, chunk] : arena.chunks_) {
      if (!inside(address) && !inside(address + chunk.bytes)) continue;
      problem("a chunk begins or ends inside a block", begin, block.bytes);
      break;
    }
    const std::size_t room = block.kept == Kept::host   ? sum_of(block.host)
                             : block.kept == Kept::file ? block.file.bytes
                                                        : SIZE_MAX;
    if (room < block.content_bytes()) problem("a block keeps less than its content", begin, room);
  }
};

std::vector<std::string> Arena::audit(const RangeSet& refused) const {
  Audit audit{*this};
  audit.check_spans(refused);
  audit.check_chunks();
  audit.check_debts();
  for (const auto& [address, allocation] : allocations_) {
    if (allocation.in_operation || allocation.dying) {
      audit.problem("an operation never ended", address, allocation.bytes);
    }
    audit.check_kept(allocation);
    for (const auto& block : allocation.blocks) audit.check_block(block, address + block.offset);
  }
  return audit.problems;
}

}  // namespace memsaver
