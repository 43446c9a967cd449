#include "backup/shared_index.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bitset>
#include <climits>
#include <cstring>
#include <ctime>
#include <iterator>
#include <set>

#include "support/packing.hpp"

namespace memsaver {

std::atomic<void (*)(const char*)> shared_step{nullptr};

namespace {

constexpr char kMagic[16] = "memsaver store1";
// The device of a dead process may still be writing the copies that were queued: eight blocks, 5 ms at 55 GB/s. The
// kernel frees the mutexes of a process before its devices.
constexpr std::int64_t kLostFor = 500;  // ms
constexpr std::size_t kProbes = 64;     // entries in which content of one digest may lie; the table is half empty

constexpr std::uint64_t kSizes[] = {sizeof(SharedLayout), kSlabBytes, kGrain, kSizeUnit, kPackedVersion};

std::int64_t now_ms() {
  using namespace std::chrono;
  return duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
}

// Returns the ith entry in which content of this digest may lie.
SharedLayout::Entry& probe(SharedLayout& layout, const Digest& digest, std::size_t i) {
  return layout.entries[(digest.lane0 + i) % kEntries];
}

}  // namespace

void SharedIndex::step(const char* point) {
  if (const auto hook = shared_step.load(std::memory_order_relaxed)) hook(point);
}

template <typename Value, typename New>
void SharedIndex::set(std::atomic<Value>& value, New to, const char* point) {
  value = to;
  step(point);
}

void SharedIndex::found(SharedLayout& layout, const DigestKey& key, std::size_t limit_bytes) {
  layout.key = key;
  layout.limit_bytes = std::min(limit_bytes, kSlabs * kSlabBytes);
  std::copy(std::begin(kSizes), std::end(kSizes), layout.sizes);
  robust::initialize(layout.mutex);
  for (auto& member : layout.members) robust::initialize(member.alive);
  std::memcpy(layout.magic, kMagic, sizeof kMagic);
}

bool SharedIndex::is_valid(const SharedLayout& layout) {
  return std::equal(std::begin(kSizes), std::end(kSizes), layout.sizes) &&
         std::memcmp(layout.magic, kMagic, sizeof kMagic) == 0;
}

bool SharedIndex::join() {
  drop_dead_members();
  for (std::uint32_t i = 0; i < kMembers; ++i) {
    auto& member = layout_.members[i];
    if (member.joined != 0 || !robust::try_lock(member.alive)) continue;
    step("join: alive");
    member_ = i;
    set(member.joined, 1u, "join: joined");
    return true;
  }
  return false;
}

void SharedIndex::leave() {
  layout_.members[member_].joined = 0;
  pthread_mutex_unlock(&layout_.members[member_].alive);
}

void SharedIndex::drop_dead_members() {
  bool any = false;
  free_lost();
  for (std::uint32_t i = 0; i < kMembers; ++i) {
    auto& member = layout_.members[i];
    if (member.joined == 0 || !robust::try_lock(member.alive)) continue;
    // If this process dies here, the next one finds the same.
    drop_all_of(i);
    step("dead: dropped");
    member.joined = 0;
    pthread_mutex_unlock(&member.alive);
    any = true;
  }
  if (any) wake();
}

// Ends every hold, claim and mapping of a member; slabs that it was making or freeing become unused ones.
void SharedIndex::drop_all_of(std::uint32_t member) {
  const std::uint64_t bit = std::uint64_t{1} << member;
  for (auto& entry : layout_.entries) {
    if (entry.state == Entry::free || (entry.holders & bit) == 0) continue;
    set(entry.holders, entry.holders & ~bit, "drop all: hold");
    if (entry.state == Entry::writing) {
      lose_entry(entry);
    } else if (entry.holders == 0) {
      free_entry(entry);
    }
  }
  for (std::uint32_t i = 0; i < layout_.slabs_end; ++i) {
    Slab& slab = layout_.slabs[i];
    slab.mapped &= ~bit;
    // Its pages are freed as those of any unused slab, whatever its state was.
    if ((slab.state == Slab::making || slab.state == Slab::freeing) && slab.member == member) {
      slab.state = Slab::present;
    }
    step("drop all: slab");
  }
}

SharedIndex::Answer SharedIndex::find_or_claim(const Digest& digest, std::size_t content_bytes, bool alone) {
  Entry* room = nullptr;
  bool being_written = false;
  for (std::size_t i = 0; i < kProbes; ++i) {
    Entry& entry = probe(layout_, digest, i);
    if (entry.state == Entry::lost) continue;
    if (entry.state == Entry::free) {
      if (room == nullptr) room = &entry;
      continue;
    }
    if (entry.lane0 != digest.lane0 || entry.lane1 != digest.lane1 || entry.content_bytes != content_bytes) continue;
    const auto index = static_cast<std::uint32_t>(&entry - layout_.entries);
    if (entry.state == Entry::kept) {
      std::vector<Piece> pieces = pieces_of(index);
      if (!is_sound(entry, pieces)) continue;  // no process of this version wrote it
      for (const Piece& piece : pieces) layout_.slabs[piece.slab].mapped |= me();
      step("find: mapped");
      set(entry.holders, entry.holders | me(), "find: held");
      return {Found::kept, index, std::move(pieces), entry.bytes, entry.packed_bytes};
    }
    being_written = true;
  }
  if (being_written && !alone) return {Found::awaited, {}, {}, {}, {}};
  if (room == nullptr) return {Found::no_room, {}, {}, {}, {}};
  room->lane0 = digest.lane0;
  room->lane1 = digest.lane1;
  room->content_bytes = content_bytes;
  room->bytes = 0;
  room->pieces = 0;
  set(room->holders, me(), "find: filled");
  set(room->state, Entry::writing, "find: claimed");
  return {Found::claimed, static_cast<std::uint32_t>(room - layout_.entries), {}, {}, {}};
}

void SharedIndex::publish(std::uint32_t index, std::size_t packed_bytes) {
  Entry& entry = layout_.entries[index];
  entry.packed_bytes = packed_bytes;
  step("publish: before");
  set(entry.state, Entry::kept, "publish: kept");
  wake();
}

void SharedIndex::drop(std::uint32_t index) {
  Entry& entry = layout_.entries[index];
  const bool awaited = entry.state == Entry::writing;
  set(entry.holders, entry.holders & ~me(), "drop: dropped");
  if (entry.holders == 0) free_entry(entry);
  if (awaited) wake();
}

void SharedIndex::free_entry(Entry& entry) {
  const std::uint32_t count = entry.pieces;
  set(entry.state, Entry::free, "free: entry");
  mark(entry, count, false);
}

void SharedIndex::lose_entry(Entry& entry) {
  entry.lost_at = now_ms();
  set(entry.state, Entry::lost, "lose: entry");
  ++layout_.lost;
}

void SharedIndex::free_lost() {
  if (layout_.lost == 0) return;
  for (auto& entry : layout_.entries) {
    if (entry.state != Entry::lost || now_ms() - entry.lost_at < kLostFor) continue;
    free_entry(entry);
    --layout_.lost;
  }
}

// Computes anew what follows from the rest: an owner of the mutex died.
void SharedIndex::repair() {
  const std::uint32_t end = layout_.slabs_end = std::min<std::uint32_t>(layout_.slabs_end, kSlabs);
  layout_.used_bytes = 0;
  layout_.slab_bytes = 0;
  layout_.lost = 0;
  for (std::uint32_t i = 0; i < end; ++i) {
    Slab& slab = layout_.slabs[i];
    std::memset(slab.taken, 0, sizeof slab.taken);
    slab.free_grains = slab.grains;
    if (slab.state != Slab::absent) layout_.slab_bytes += bytes_of(i);
  }
  step("repair: cleared");
  for (auto& entry : layout_.entries) {
    if (entry.state == Entry::free) continue;
    mark(entry, entry.pieces, true);
    if (entry.state == Entry::lost) {
      ++layout_.lost;
    } else if (entry.holders == 0) {  // killed between the two
      entry.state == Entry::writing ? lose_entry(entry) : free_entry(entry);
    }
  }
}

void SharedIndex::wait_for_change(std::uint32_t seen, std::chrono::milliseconds at_most) {
  const timespec time{at_most.count() / 1000, static_cast<long>(at_most.count() % 1000) * 1'000'000};
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&layout_.changes), FUTEX_WAIT, seen, &time, nullptr, 0);
}

void SharedIndex::wake() {
  ++layout_.changes;
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&layout_.changes), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

std::size_t SharedIndex::holders(std::uint32_t entry) const {
  return std::max<std::size_t>(1, std::bitset<64>(layout_.entries[entry].holders).count());
}

std::size_t SharedIndex::members() const {
  return static_cast<std::size_t>(std::count_if(std::begin(layout_.members), std::end(layout_.members),
                                                [](const auto& member) { return member.joined != 0; }));
}

bool SharedIndex::is_sound(const Piece& piece) const {
  if (piece.slab >= kSlabs || piece.grains == 0) return false;
  const std::size_t grains = bytes_of(piece.slab) / kGrain;
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

void SharedIndex::mark(const Entry& entry, std::uint32_t pieces, bool taken) {
  for (std::uint32_t i = 0; i < std::min<std::uint32_t>(pieces, kPieces); ++i) mark(entry.piece[i], taken);
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

// Returns whether the sizes of a kept entry can be those of what a process of this version wrote.
bool SharedIndex::is_sound(const Entry& entry, const std::vector<Piece>& pieces) {
  std::size_t grains = 0;
  for (const auto& piece : pieces) grains += piece.grains;
  if (entry.bytes > grains * kGrain || entry.packed_bytes > packed_limit(entry.content_bytes)) return false;
  return (entry.packed_bytes != 0 ? entry.packed_bytes : entry.content_bytes) <= entry.bytes;
}

// Returns the longest free run of a slab, or the first one of `enough` grains.
SharedIndex::Piece SharedIndex::longest_run(std::uint32_t index, std::size_t enough) const {
  const Slab& slab = layout_.slabs[index];
  const auto grains = static_cast<std::uint32_t>(bytes_of(index) / kGrain);
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

// In one piece if a slab has room for it, preferably one that this member has mapped; else in several.
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
    mark(entry, count, false);
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
  set(layout_.slabs[slab].state, Slab::present, "slab: made");
  wake();
}

template <typename Wanted>
std::vector<std::uint32_t> SharedIndex::present_slabs(const Wanted& wanted) const {
  std::vector<std::uint32_t> slabs;
  for (std::uint32_t i = 0; i < layout_.slabs_end; ++i) {
    if (layout_.slabs[i].state == Slab::present && wanted(i, layout_.slabs[i])) slabs.push_back(i);
  }
  return slabs;
}

std::vector<std::uint32_t> SharedIndex::unmap_unneeded(const std::vector<std::uint32_t>& entries) {
  std::set<std::uint32_t> needed;
  for (const std::uint32_t entry : entries) {
    for (const auto& piece : pieces_of(entry)) needed.insert(piece.slab);
  }
  const std::vector<std::uint32_t> unneeded = present_slabs(
      [&](std::uint32_t index, const Slab& slab) { return (slab.mapped & me()) != 0 && needed.count(index) == 0; });
  for (const std::uint32_t index : unneeded) layout_.slabs[index].mapped &= ~me();
  return unneeded;
}

std::vector<std::uint32_t> SharedIndex::begin_freeing() {
  const std::vector<std::uint32_t> unused = present_slabs(
      [](std::uint32_t, const Slab& slab) { return slab.mapped == 0 && slab.free_grains == slab.grains; });
  for (const std::uint32_t index : unused) {
    layout_.slabs[index].member = member_;
    set(layout_.slabs[index].state, Slab::freeing, "slab: freeing");
  }
  return unused;
}

void SharedIndex::end_freeing(std::uint32_t index) {
  set(layout_.slabs[index].state, Slab::absent, "slab: freed");
  layout_.slab_bytes -= bytes_of(index);
}

std::vector<std::uint32_t> SharedIndex::unmapped_slabs() const {
  return present_slabs([this](std::uint32_t, const Slab& slab) { return (slab.mapped & me()) == 0; });
}

}  // namespace memsaver
