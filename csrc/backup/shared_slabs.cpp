// The memory of a store, divided among its entries: the part of SharedIndex that counts grains.

#include <set>
#include <utility>

#include "backup/shared_index.hpp"
#include "support/packing.hpp"

namespace memsaver {

bool SharedIndex::is_sound(const Piece& piece) const {
  if (piece.slab >= kSlabs || piece.grains == 0) return false;
  const std::size_t grains = std::min<std::size_t>(layout_.slabs[piece.slab].grains, kSlabGrains);
  return piece.first < grains && piece.grains <= grains - piece.first;
}

void SharedIndex::mark(const Piece& piece, bool taken) {
  if (!is_sound(piece)) return;
  Slab& slab = layout_.slabs[piece.slab];
  for (std::uint32_t grain = piece.first; grain < piece.first + piece.grains; ++grain) {
    const std::uint64_t bit = std::uint64_t{1} << (grain % 64);
    std::uint64_t& word = slab.taken[grain / 64];
    word = taken ? word | bit : word & ~bit;
  }
  if (taken) {
    slab.free_grains -= piece.grains;
    layout_.used_bytes += piece.grains * kGrain;
  } else {
    slab.free_grains += piece.grains;
    layout_.used_bytes -= piece.grains * kGrain;
  }
}

std::vector<SharedIndex::Piece> SharedIndex::pieces_of(std::uint32_t index) const {
  const Entry& entry = layout_.entries[index];
  std::vector<Piece> pieces;
  const std::uint32_t count = std::min<std::uint32_t>(entry.pieces, kPieces);
  for (std::uint32_t i = 0; i < count; ++i) {
    if (is_sound(entry.piece[i])) pieces.push_back(entry.piece[i]);
  }
  return pieces;
}

// Whether the sizes of a kept entry can be those of what a process of this version wrote.
bool SharedIndex::is_sound(const Entry& entry, const std::vector<Piece>& pieces) {
  std::size_t grains = 0;
  for (const auto& piece : pieces) grains += piece.grains;
  if (entry.bytes > grains * kGrain || entry.packed_bytes > packed_limit(entry.content_bytes)) return false;
  return (entry.packed_bytes != 0 ? entry.packed_bytes : entry.content_bytes) <= entry.bytes;
}

// The longest free run of a slab, or the first one of `enough` grains.
SharedIndex::Piece SharedIndex::longest_run(std::uint32_t index, std::size_t enough) const {
  const Slab& slab = layout_.slabs[index];
  const auto grains = static_cast<std::uint32_t>(std::min<std::size_t>(slab.grains, kSlabGrains));
  Piece best{index, 0, 0};
  for (std::uint32_t grain = 0, begin = 0; grain <= grains; ++grain) {
    if (grain < grains && (slab.taken[grain / 64] >> (grain % 64) & 1) == 0) continue;
    if (grain - begin > best.grains) best = {index, begin, grain - begin};
    if (best.grains >= enough) break;
    begin = grain + 1;
  }
  best.grains = static_cast<std::uint32_t>(std::min<std::size_t>(best.grains, enough));
  return best;
}

// In one piece if a slab has room for it, one that this member has mapped before others; else in several.
bool SharedIndex::take(std::uint32_t index, std::size_t bytes) {
  Entry& entry = layout_.entries[index];
  std::size_t missing = (bytes + kGrain - 1) / kGrain;
  std::uint32_t count = 0;
  while (missing > 0 && count < kPieces) {
    Piece best{0, 0, 0};
    for (const bool mine : {true, false}) {
      for (std::uint32_t i = 0; i < layout_.slabs_end && best.grains < missing; ++i) {
        const Slab& slab = layout_.slabs[i];
        if (slab.state != Slab::present || slab.free_grains <= best.grains) continue;
        if (((slab.mapped & me()) != 0) != mine) continue;
        const Piece run = longest_run(i, missing);
        if (run.grains > best.grains) best = run;
      }
    }
    if (best.grains == 0) break;
    mark(best, true);
    step("take: marked");
    entry.piece[count++] = best;
    missing -= best.grains;
  }
  if (missing > 0) {
    for (std::uint32_t i = 0; i < count; ++i) mark(entry.piece[i], false);
    return false;
  }
  for (std::uint32_t i = 0; i < count; ++i) layout_.slabs[entry.piece[i].slab].mapped |= me();
  entry.bytes = bytes;
  entry.pieces = count;
  step("take: taken");
  return true;
}

std::optional<std::uint32_t> SharedIndex::begin_slab(std::size_t at_least, std::size_t at_most) {
  const std::size_t now = layout_.slab_bytes;
  const std::size_t allowed = layout_.limit_bytes > now ? (layout_.limit_bytes - now) / kGrain * kGrain : 0;
  const std::size_t bytes = std::min({round_up(at_most, kGrain), allowed, kSlabBytes});
  if (bytes == 0 || bytes < at_least) return std::nullopt;
  std::uint32_t index = 0;
  while (index < layout_.slabs_end && layout_.slabs[index].state != Slab::absent) ++index;
  if (index == kSlabs) return std::nullopt;
  Slab& slab = layout_.slabs[index];
  slab.member = member_;
  slab.grains = slab.free_grains = static_cast<std::uint32_t>(bytes / kGrain);
  std::fill(std::begin(slab.taken), std::end(slab.taken), 0);
  slab.mapped = me();
  layout_.slabs_end = std::max<std::uint32_t>(layout_.slabs_end, index + 1);
  slab.state = Slab::making;
  layout_.slab_bytes += bytes;
  step("slab: begun");
  return index;
}

void SharedIndex::end_slab(std::uint32_t slab) {
  layout_.slabs[slab].state = Slab::present;
  step("slab: made");
  wake();
}

std::vector<std::uint32_t> SharedIndex::unmap_unneeded(const std::vector<std::uint32_t>& entries) {
  std::set<std::uint32_t> needed;
  for (const std::uint32_t entry : entries) {
    for (const auto& piece : pieces_of(entry)) needed.insert(piece.slab);
  }
  std::vector<std::uint32_t> unneeded;
  for (std::uint32_t i = 0; i < layout_.slabs_end; ++i) {
    Slab& slab = layout_.slabs[i];
    if (slab.state != Slab::present || (slab.mapped & me()) == 0 || needed.count(i) != 0) continue;
    slab.mapped &= ~me();
    unneeded.push_back(i);
  }
  return unneeded;
}

std::vector<std::uint32_t> SharedIndex::unused_slabs() {
  std::vector<std::uint32_t> unused;
  for (std::uint32_t i = 0; i < layout_.slabs_end; ++i) {
    Slab& slab = layout_.slabs[i];
    if (slab.state != Slab::present || slab.mapped != 0 || slab.free_grains != slab.grains) continue;
    slab.member = member_;
    slab.state = Slab::going;
    step("slab: going");
    unused.push_back(i);
  }
  return unused;
}

void SharedIndex::gone(std::uint32_t index) {
  Slab& slab = layout_.slabs[index];
  slab.state = Slab::absent;
  step("slab: gone");
  layout_.slab_bytes -= bytes_of(index);
}

std::vector<std::uint32_t> SharedIndex::unmapped_slabs() const {
  std::vector<std::uint32_t> slabs;
  for (std::uint32_t i = 0; i < layout_.slabs_end; ++i) {
    const Slab& slab = layout_.slabs[i];
    if (slab.state == Slab::present && (slab.mapped & me()) == 0) slabs.push_back(i);
  }
  return slabs;
}

}  // namespace memsaver
