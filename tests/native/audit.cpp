#include "audit.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "vmm/saver.hpp"

namespace memsaver {

struct SaverAudit {
  static std::vector<std::string> audit(Saver& saver, const std::map<int, std::size_t>& others);
  static std::vector<std::pair<Address, std::size_t>> left_mapped(const Saver& saver);
};

struct ArenaAudit {
  static constexpr std::size_t kPage = 4096;  // no driver maps less at once

  const Arena& arena;
  std::vector<std::string>& problems;

  void problem(const char* what, Address address, std::size_t bytes) {
    char text[160];
    std::snprintf(text, sizeof text, "tag '%s', %s: %s [0x%zx, +%zu]", arena.key_.tag.c_str(),
                  name_of(arena.key_.restore), what, static_cast<std::size_t>(address), bytes);
    problems.emplace_back(text);
  }

  // Live and free ranges tile the spans. `withheld`: free ranges that an orphan is mapped at.
  void check_spans(const RangeSet& withheld) {
    std::map<Address, std::size_t> tiles;
    RangeSet live;
    for (const auto& [address, allocation] : arena.allocations_) {
      tiles.emplace(address, allocation.bytes);
      live.add(address, allocation.bytes);
    }
    for (const RangeSet* set : {&arena.mapped_, &arena.unmapped_, &withheld}) {
      for (const auto& [address, bytes] : set->ranges()) {
        if (!tiles.emplace(address, bytes).second) problem("an address is both free and in use", address, bytes);
      }
    }
    if (live.ranges() != arena.live_.ranges()) {
      problem("live ranges are not those of the allocations", arena.live_.total_bytes(), live.total_bytes());
    }
    auto tile = tiles.begin();
    for (const auto& [address, bytes] : arena.spans_.ranges()) {
      Address at = address;
      for (; tile != tiles.end() && tile->first == at && at < address + bytes; ++tile) at += tile->second;
      if (at != address + bytes) problem("a span is not tiled by live and free ranges", at, 0);
    }
    if (tile != tiles.end()) problem("a range is outside all spans", tile->first, tile->second);
  }

  [[nodiscard]] bool released_under(Restore restore, Address address, std::size_t bytes) const {
    const auto ranges = arena.released_under_.find(restore);
    return ranges != arena.released_under_.end() && ranges->second.overlaps(address, bytes);
  }

  // Chunks lie in spans and do not overlap; free ranges have memory exactly if they are listed with memory.
  void check_chunks() {
    Address end = 0;
    for (const auto& [address, chunk] : arena.chunks_) {
      const std::size_t bytes = chunk.bytes;
      if (address != chunk.address || address < end) problem("chunks overlap", address, bytes);
      end = address + bytes;
      if (!arena.owns(address) || !arena.owns(end - 1)) problem("a chunk is outside all spans", address, bytes);
      if (arena.unmapped_.overlaps(address, bytes)) problem("a free range has memory unlisted", address, bytes);
      if (arena.shrunk_.overlaps(address, bytes)) problem("what a resize gave back has memory", address, bytes);
      for (const auto& [restore, ranges] : arena.released_under_) {
        if (ranges.overlaps(address, bytes)) problem("content is to be restored where memory is", address, bytes);
      }
    }
    for (const auto& [address, bytes] : arena.mapped_.ranges()) {
      if (!arena.is_mapped(address, bytes)) problem("a free range lacks its memory", address, bytes);
    }
  }

  // Each live range without memory was released under exactly one policy.
  void check_policies() {
    const RangeSet released = arena.released();
    for (const auto& [begin, bytes] : released.ranges()) {
      std::size_t sum = 0;
      for (Address at = begin; at < begin + bytes; at += kPage) {
        for (const auto& [restore, ranges] : arena.released_under_) sum += ranges.contains(at, kPage) ? kPage : 0;
      }
      if (sum != bytes) problem("a range was not released under one policy", begin, bytes);
    }
  }

  // Content that a resume must restore is kept.
  void check_kept(const Allocation& allocation) {
    const auto kept_at = [&](Address at) {
      for (const auto& block : allocation.blocks) {
        const Address begin = allocation.address + block.offset;
        if (at >= begin && at < begin + block.bytes) return block.kept;
      }
      return Kept::nothing;
    };
    for (Address at = allocation.address; at < allocation.address + allocation.bytes; at += kPage) {
      const bool content = released_under(Restore::host, at, kPage) || released_under(Restore::file, at, kPage);
      if (content && kept_at(at) == Kept::nothing) problem("content that is to be restored is not kept", at, kPage);
    }
  }

  // No chunk begins or ends inside a block, and a block has room for its backup.
  void check_block(const Block& block, Address begin) {
    const auto inside = [&](Address at) { return begin < at && at < begin + block.bytes; };
    const bool cut = std::any_of(arena.chunks_.begin(), arena.chunks_.end(), [&](const auto& each) {
      return inside(each.first) || inside(each.first + each.second.bytes);
    });
    if (cut) problem("a chunk begins or ends inside a block", begin, block.bytes);
    if (arena.shrunk_edge(begin, begin + block.bytes) != begin + block.bytes) {
      problem("a part of a block was given back by a resize", begin, block.bytes);
    }
    const std::size_t room = block.kept == Kept::host   ? sum_of(block.host)
                             : block.kept == Kept::file ? block.file.bytes
                                                        : SIZE_MAX;
    if (room < (block.packed_bytes != 0 ? block.packed_bytes : block.content_bytes()))
      problem("a block keeps less than its content", begin, room);
  }

  void check(const RangeSet& withheld) {
    if (arena.busy()) problem("an operation never ended", 0, 0);
    check_spans(withheld);
    check_chunks();
    check_policies();
    for (const auto& [address, allocation] : arena.allocations_) {
      if (allocation.in_operation || allocation.freed) problem("an operation never ended", address, allocation.bytes);
      check_kept(allocation);
      for (const auto& block : allocation.blocks) check_block(block, address + block.offset);
    }
  }
};

std::vector<std::string> audit(Saver& saver, const std::map<int, std::size_t>& others) {
  return SaverAudit::audit(saver, others);
}

std::vector<std::pair<Address, std::size_t>> left_mapped(const Saver& saver) { return SaverAudit::left_mapped(saver); }

std::vector<std::pair<Address, std::size_t>> SaverAudit::left_mapped(const Saver& saver) {
  std::vector<std::pair<Address, std::size_t>> ranges;
  for (const auto& orphan : saver.physical_.orphans()) {
    if (orphan.mapped_at != 0) ranges.emplace_back(orphan.mapped_at, orphan.bytes);
  }
  return ranges;
}

std::vector<std::string> SaverAudit::audit(Saver& saver, const std::map<int, std::size_t>& others) {
  std::vector<std::string> problems;
  std::map<int, std::size_t> device_bytes;
  std::size_t host_bytes = 0;
  std::size_t file_bytes = 0;
  std::map<std::uint32_t, std::size_t> entries;  // of the shared store; several blocks may use one
  const Lock operation(saver.backups_.operation_mutex);
  for (const int device : saver.map_.devices()) device_bytes[device] = 0;
  for (const auto& [device, pipeline] : saver.backups_.pipelines_) {
    device_bytes[device] += pipeline->packing.held_bytes();  // that the driver did not take back
  }
  const auto orphans = saver.physical_.orphans();
  for (const auto& orphan : orphans) device_bytes[orphan.device] += orphan.bytes;
  for (const auto& [device, bytes] : saver.physical_.reserved_by_device()) device_bytes[device] += bytes;
  {
    const Lock lock(saver.map_.mutex);
    for (const Arena* const arena : saver.map_.select({})) {
      RangeSet withheld;
      for (const auto& orphan : orphans) {
        if (orphan.arena != arena) continue;
        for (const auto& range : orphan.withheld) withheld.add(range.begin, range.bytes);
      }
      ArenaAudit{*arena, problems}.check(withheld);
      device_bytes[arena->key().device] += arena->mapped_bytes();
      for (const auto& [address, allocation] : arena->allocations()) {
        for (const auto& block : allocation.blocks) {
          if (!block.shared) host_bytes += sum_of(block.host);
          if (block.shared) entries[*block.shared] = saver.backups_.shared()->stored_bytes(*block.shared);
          file_bytes += block.file.bytes;
        }
      }
    }
  }
  const auto compare = [&](const std::string& what, std::size_t counted, std::size_t expected) {
    if (counted == expected) return;
    problems.push_back(what + ": " + std::to_string(counted) + " bytes are handed out, and " +
                       std::to_string(expected) + " are accounted for");
  };
  compare("host memory", saver.backups_.pool_status().used_bytes, host_bytes);
  if (const SharedStore* const store = saver.backups_.shared()) {
    std::size_t bytes = 0;
    for (const auto& [entry, each] : entries) bytes += each;
    compare("shared store", store->status().held_bytes, bytes);
  }
  compare("backup file", saver.backups_.files().used_bytes(), file_bytes);
  for (const auto& [device, bytes] : device_bytes) {
    const MemoryInfo memory = saver.driver_->memory_info(device);
    const auto other = others.find(device);
    compare("device " + std::to_string(device), memory.total_bytes - memory.free_bytes,
            bytes + (other == others.end() ? 0 : other->second));
  }
  return problems;
}

}  // namespace memsaver
