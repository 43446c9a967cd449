#include "backup/shared_index.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <bitset>
#include <climits>
#include <cstring>
#include <ctime>
#include <iterator>
#include <utility>

#include "support/packing.hpp"

namespace memsaver {

std::atomic<void (*)(const char*)> shared_step{nullptr};

namespace {

constexpr char kMagic[16] = "memsaver store1";
// The device of a dead process may still be writing the copies that were queued: eight blocks, 5 ms at 55 GB/s. The
// kernel frees the mutexes of a process before its devices.
constexpr std::int64_t kLostFor = 500;  // ms
constexpr std::size_t kProbes = 64;     // entries in which content of one digest may lie; the table is half empty

constexpr std::uint64_t sizes_of_this_build(std::size_t which) {
  constexpr std::uint64_t sizes[] = {sizeof(SharedLayout), kSlabBytes, kGrain, kSizeUnit, kPackedVersion};
  return sizes[which];
}

std::int64_t now_ms() {
  using namespace std::chrono;
  return duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
}

// The ith place at which content of this digest may lie.
SharedLayout::Entry& probe(SharedLayout& layout, const Digest& digest, std::size_t i) {
  return layout.entries[(digest.lane0 + i) % kEntries];
}

}  // namespace

void SharedIndex::step(const char* point) {
  if (const auto hook = shared_step.load(std::memory_order_relaxed)) hook(point);
}

void SharedIndex::found(SharedLayout& layout, const DigestKey& key, std::size_t limit_bytes) {
  layout.key = key;
  layout.limit_bytes = std::min(limit_bytes, kSlabs * kSlabBytes);
  for (std::size_t i = 0; i < std::size(layout.sizes); ++i) layout.sizes[i] = sizes_of_this_build(i);
  robust::initialize(layout.mutex);
  for (auto& member : layout.members) robust::initialize(member.alive);
  std::memcpy(layout.magic, kMagic, sizeof kMagic);
}

bool SharedIndex::is_valid(const SharedLayout& layout) {
  for (std::size_t i = 0; i < std::size(layout.sizes); ++i) {
    if (layout.sizes[i] != sizes_of_this_build(i)) return false;
  }
  return std::memcmp(layout.magic, kMagic, sizeof kMagic) == 0;
}

bool SharedIndex::join() {
  bury();
  for (std::uint32_t i = 0; i < kMembers; ++i) {
    auto& member = layout_.members[i];
    if (member.joined != 0) continue;
    const robust::Taken taken = robust::try_lock(member.alive);
    if (taken == robust::Taken::no) continue;
    if (taken == robust::Taken::from_the_dead) robust::make_consistent(member.alive);
    step("join: alive");
    member_ = i;
    member.joined = 1;
    step("join: joined");
    return true;
  }
  return false;
}

void SharedIndex::leave() {
  layout_.members[member_].joined = 0;
  robust::unlock(layout_.members[member_].alive);
}

bool SharedIndex::bury() {
  bool any = false;
  free_lost();
  for (std::uint32_t i = 0; i < kMembers; ++i) {
    auto& member = layout_.members[i];
    if (member.joined == 0) continue;
    const robust::Taken taken = robust::try_lock(member.alive);
    if (taken == robust::Taken::no) continue;
    // If this process dies here, the next one finds the same.
    forget(i);
    step("bury: forgotten");
    member.joined = 0;
    if (taken == robust::Taken::from_the_dead) robust::make_consistent(member.alive);
    robust::unlock(member.alive);
    any = true;
  }
  if (any) wake();
  return any;
}

// Every hold, claim and mapping of a member ends; slabs that it was making or letting go are to be let go.
void SharedIndex::forget(std::uint32_t member) {
  const std::uint64_t bit = std::uint64_t{1} << member;
  for (auto& entry : layout_.entries) {
    if (entry.state == Entry::free || (entry.holders & bit) == 0) continue;
    entry.holders &= ~bit;
    step("forget: hold");
    if (entry.state == Entry::writing) {
      lose_entry(entry);
    } else if (entry.holders == 0) {
      free_entry(entry);
    }
  }
  for (std::uint32_t i = 0; i < layout_.slabs_end; ++i) {
    Slab& slab = layout_.slabs[i];
    slab.mapped &= ~bit;
    // Its pages are given back by unused_slabs(), whatever its state was.
    if ((slab.state == Slab::making || slab.state == Slab::going) && slab.member == member) slab.state = Slab::present;
    step("forget: slab");
  }
}

SharedIndex::Answer SharedIndex::want(const Digest& digest, std::size_t content_bytes, bool alone) {
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
      if (!is_sound(entry, pieces)) continue;  // nothing that a process of this version wrote
      for (const Piece& piece : pieces) layout_.slabs[piece.slab].mapped |= me();
      step("want: mapped");
      entry.holders |= me();
      step("want: held");
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
  room->holders = me();
  step("want: filled");
  room->state = Entry::writing;
  step("want: claimed");
  return {Found::claimed, static_cast<std::uint32_t>(room - layout_.entries), {}, {}, {}};
}

void SharedIndex::publish(std::uint32_t index, std::size_t packed_bytes) {
  Entry& entry = layout_.entries[index];
  entry.packed_bytes = packed_bytes;
  step("publish: before");
  entry.state = Entry::kept;
  step("publish: kept");
  wake();
}

void SharedIndex::drop(std::uint32_t index) {
  Entry& entry = layout_.entries[index];
  const bool awaited = entry.state == Entry::writing;
  entry.holders &= ~me();
  step("drop: let go");
  if (entry.holders == 0) free_entry(entry);
  if (awaited) wake();
}

void SharedIndex::free_entry(Entry& entry) {
  const std::uint32_t count = std::min<std::uint32_t>(entry.pieces, kPieces);
  entry.state = Entry::free;
  step("free: entry");
  for (std::uint32_t i = 0; i < count; ++i) mark(entry.piece[i], false);
}

void SharedIndex::lose_entry(Entry& entry) {
  entry.lost_at = now_ms();
  entry.state = Entry::lost;
  step("lose: entry");
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

// What is computed from the rest, anew: an owner of the mutex died.
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
    const std::uint32_t count = std::min<std::uint32_t>(entry.pieces, kPieces);
    for (std::uint32_t i = 0; i < count; ++i) mark(entry.piece[i], true);
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

}  // namespace memsaver
