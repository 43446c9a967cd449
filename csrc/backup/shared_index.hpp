#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bitset>
#include <climits>
#include <iterator>
#include <optional>
#include <set>
#include <vector>

#include "support/digest.hpp"
#include "support/packing.hpp"
#include "support/robust_mutex.hpp"
#include "support/sizes.hpp"

namespace memsaver {

inline const std::size_t kSlabBytes = 128 * kSizeUnit;  // as large as a slice of HostPool, for the same reasons
inline const std::size_t kGrain = std::max<std::size_t>(kSizeUnit / 16, 4096);
inline constexpr std::size_t kSlabGrains = 2048;  // at most
inline constexpr std::size_t kSlabs = 8192;       // 1 TiB
inline constexpr std::size_t kEntries = 1 << 15;  // 1 TiB of whole blocks
inline constexpr std::size_t kTexts = 256;        // texts lie among the first ones or just behind: to list them is fast
inline constexpr std::size_t kMembers = 64;
inline constexpr std::size_t kPieces = 8;  // of one block at most: a block also fits where free memory is scattered

// The beginning of a store's memory file: which content it holds, where, and for which processes. Behind it lie the
// slabs; a hole in the file takes no memory. Each change becomes valid by one store of an atomic, so a process may be
// killed at any instant; the fields marked "computed" then follow from the others, and are computed anew.
struct SharedLayout {
  struct Member {
    enum Kind : std::uint32_t { none, engine, keeper };
    pthread_mutex_t alive;              // the liveness mutex: held by a thread of the process as long as it is a member
    std::atomic<std::uint32_t> joined;  // a Kind
    std::atomic<std::uint32_t> process;  // its id
  };
  struct Slab {
    enum State : std::uint32_t { absent, making, present, freeing };
    std::atomic<std::uint32_t> state;
    std::uint32_t member;  // that makes or frees it
    std::uint32_t grains;
    std::uint32_t free_grains;              // computed
    std::atomic<std::uint64_t> mapped;      // by these members; its pages are kept until there is none
    std::uint64_t taken[kSlabGrains / 64];  // computed
  };
  struct Piece {
    std::uint32_t slab;
    std::uint32_t first;  // grain
    std::uint32_t grains;
  };
  // A text is an entry without content bytes: its digest is a name by which processes find it.
  struct Entry {
    enum State : std::uint32_t { free, writing, kept, lost };
    enum Mark : std::uint32_t { unmarked, pinned, dropped };  // nobody finds what is dropped; texts alone are pinned
    std::atomic<std::uint32_t> state;
    std::atomic<std::uint64_t> holders;  // members; while writing the writer alone
    std::uint64_t lane0, lane1;          // the digest of the content
    std::uint64_t content_bytes;
    std::atomic<std::uint64_t> bytes;   // as stored
    std::uint64_t packed_bytes;         // of what is stored, if it is packed
    std::int64_t at;                    // ms: when its writer was found dead; of a text, when it was last used
    std::atomic<std::uint32_t> pieces;  // how many of `piece` hold it, in order
    std::atomic<std::uint32_t> mark;
    Piece piece[kPieces];
  };

  char magic[16];
  std::uint64_t sizes[5];  // the same in builds that can share a store
  DigestKey key;
  std::uint64_t limit_bytes;
  pthread_mutex_t mutex;               // guards all below
  std::atomic<std::uint32_t> changes;  // a futex: counts what another process may wait for
  std::atomic<std::uint32_t> slabs_end;
  std::atomic<std::uint64_t> slab_bytes;  // computed; memory of all slabs
  std::atomic<std::uint64_t> used_bytes;  // computed; of it, taken by entries
  std::atomic<std::uint32_t> lost;        // computed; entries
  std::atomic<std::uint64_t> wanted;      // bytes that a member lacks: keepers are to drop something
  Member members[kMembers];
  Slab slabs[kSlabs];
  Entry entries[kEntries];

  static constexpr std::size_t slabs_at() { return round_up(sizeof(SharedLayout), std::size_t{2} << 20); }
  static std::size_t file_bytes() { return slabs_at() + kSlabs * kSlabBytes; }
};

// Called at each point at which tests end the process.
inline std::atomic<void (*)(const char* point)> shared_step{nullptr};

// One member's operations on a SharedLayout, which it does not own. None makes a system call except to wake and to
// wait. Functions that need no mutex may be called by any thread.
class SharedIndex {
 public:
  using Slab = SharedLayout::Slab;
  using Entry = SharedLayout::Entry;
  using Piece = SharedLayout::Piece;

  // Makes a layout of new memory that is zero. Throws configuration.
  static void create(SharedLayout& layout, const DigestKey& key, std::size_t limit_bytes) {
    layout.key = key;
    layout.limit_bytes = std::min(limit_bytes, kSlabs * kSlabBytes);
    std::copy(std::begin(kSizes), std::end(kSizes), layout.sizes);
    robust::initialize(layout.mutex);
    for (auto& member : layout.members) robust::initialize(member.alive);
    std::memcpy(layout.magic, kMagic, sizeof kMagic);
  }
  // Returns whether create() completed it, in a build with equal sizes.
  [[nodiscard]] static bool is_valid(const SharedLayout& layout) {
    return std::equal(std::begin(kSizes), std::end(kSizes), layout.sizes) &&
           std::memcmp(layout.magic, kMagic, sizeof kMagic) == 0;
  }

  explicit SharedIndex(SharedLayout& layout)
      : mutex(layout.mutex, [this]() NO_THREAD_SAFETY_ANALYSIS { repair(); }), layout_(layout) {}

  RobustMutex mutex;

  // Makes this process a member, whose liveness mutex this thread holds from now on; false if there are kMembers.
  [[nodiscard]] bool join(SharedLayout::Member::Kind kind) REQUIRES(mutex) {
    drop_dead_members();
    for (std::uint32_t i = 0; i < kMembers; ++i) {
      auto& member = layout_.members[i];
      if (member.joined != 0 || !robust::try_lock(member.alive)) continue;
      step("join: alive");
      member_ = i;
      member.process = static_cast<std::uint32_t>(getpid());
      set(member.joined, std::uint32_t{kind}, "join: joined");
      return true;
    }
    return false;
  }
  // Drops all that this member has.
  void drop_all() REQUIRES(mutex) { drop_all_of(member_); }
  // Unregisters this member, after drop_all(). Only the thread that joined may call it.
  void leave() REQUIRES(mutex) {
    layout_.members[member_].joined = 0;
    pthread_mutex_unlock(&layout_.members[member_].alive);
  }
  // Drops what dead members had.
  void drop_dead_members() REQUIRES(mutex) {
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

  enum class Found {
    kept,     // this member holds the content from now on
    claimed,  // no process has it, and this member is to write it
    awaited,  // another member is writing it
    no_room,  // the index is full
  };
  struct Answer {
    Found found;
    std::uint32_t entry = 0;       // kept, claimed
    std::vector<Piece> pieces{};   // kept: that hold it
    std::size_t bytes = 0;         // kept: as stored
    std::size_t packed_bytes = 0;  // kept: 0 unless packed
  };
  // Looks for content, and claims it if no member has it; with `alone` also if another member is writing it.
  [[nodiscard]] Answer find_or_claim(const Digest& digest, std::size_t content_bytes, bool alone) REQUIRES(mutex) {
    Entry* room = nullptr;
    bool being_written = false;
    for (std::size_t i = 0; i < kProbes; ++i) {
      Entry& entry = layout_.entries[(home(digest, content_bytes) + i) % kEntries];
      if (entry.state == Entry::lost) continue;
      if (entry.state == Entry::free) {
        if (room == nullptr) room = &entry;
        continue;
      }
      if (!is_of(entry, digest, content_bytes)) continue;
      const auto index = static_cast<std::uint32_t>(&entry - layout_.entries);
      if (entry.state == Entry::kept) {
        std::vector<Piece> pieces = pieces_of(index);
        if (!is_sound(entry, pieces)) continue;  // no process of this version wrote it
        for (const Piece& piece : pieces) layout_.slabs[piece.slab].mapped |= me();
        if (content_bytes == 0) entry.at = now_ms();
        step("find: mapped");
        set(entry.holders, entry.holders | me(), "find: held");
        return {Found::kept, index, std::move(pieces), entry.bytes, entry.packed_bytes};
      }
      being_written = true;
    }
    if (being_written && !alone) return {Found::awaited};
    if (room == nullptr) return {Found::no_room};
    room->lane0 = digest.lane0;
    room->lane1 = digest.lane1;
    room->content_bytes = content_bytes;
    room->bytes = 0;
    room->pieces = 0;
    room->mark = Entry::unmarked;
    set(room->holders, me(), "find: filled");
    set(room->state, Entry::writing, "find: claimed");
    return {Found::claimed, static_cast<std::uint32_t>(room - layout_.entries)};
  }
  // Takes memory for a claim, in one piece if a slab has room, preferably one that this member has mapped; else in
  // several. Returns false, with nothing taken, if the slabs have too little.
  [[nodiscard]] bool take(std::uint32_t index, std::size_t bytes) REQUIRES(mutex) {
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
  // Lets other members find a claim whose content is written.
  void publish(std::uint32_t index, std::size_t packed_bytes) REQUIRES(mutex) {
    Entry& entry = layout_.entries[index];
    entry.packed_bytes = packed_bytes;
    if (entry.content_bytes == 0) entry.at = now_ms();
    step("publish: before");
    set(entry.state, Entry::kept, "publish: kept");
    wake();
  }
  // Ends this member's hold or claim.
  void drop(std::uint32_t index) REQUIRES(mutex) {
    Entry& entry = layout_.entries[index];
    const bool awaited = entry.state == Entry::writing;
    set(entry.holders, entry.holders & ~me(), "drop: dropped");
    if (entry.holders == 0) free_entry(entry);
    if (awaited) wake();
  }
  // Returns the pieces of an entry that this member holds or writes, checked to lie in slabs.
  [[nodiscard]] std::vector<Piece> pieces_of(std::uint32_t index) const REQUIRES(mutex) {
    const Entry& entry = layout_.entries[index];
    std::vector<Piece> pieces;
    const std::uint32_t count = std::min<std::uint32_t>(entry.pieces, kPieces);
    for (std::uint32_t i = 0; i < count; ++i) {
      if (is_sound(entry.piece[i])) pieces.push_back(entry.piece[i]);
    }
    return pieces;
  }

  struct Text {
    std::uint32_t entry;
    std::string name;                           // 32 hexadecimal digits
    std::uint32_t mark;                         // a Mark
    std::int64_t unused_ms;                     // since it was last used
    std::vector<std::pair<int, bool>> holders;  // the process of each, and whether it is a keeper
  };
  // Returns the texts that are kept and not dropped.
  [[nodiscard]] std::vector<Text> texts() const REQUIRES(mutex) {
    std::vector<Text> texts;
    for (std::uint32_t i = 0; i < kTexts + kProbes; ++i) {
      const Entry& entry = layout_.entries[i];
      if (entry.state != Entry::kept || entry.content_bytes != 0 || entry.mark == Entry::dropped) continue;
      char name[33];
      std::snprintf(name, sizeof name, "%016llx%016llx", static_cast<unsigned long long>(entry.lane0),
                    static_cast<unsigned long long>(entry.lane1));
      texts.push_back({i, name, entry.mark, now_ms() - entry.at, {}});
      for (std::uint32_t m = 0; m < kMembers; ++m) {
        const auto& member = layout_.members[m];
        if ((entry.holders >> m & 1) == 0) continue;
        texts.back().holders.emplace_back(member.process, member.joined == SharedLayout::Member::keeper);
      }
    }
    return texts;
  }
  // Marks a text, and wakes the processes that wait for a change.
  void mark_text(std::uint32_t index, std::uint32_t mark) REQUIRES(mutex) {
    set(layout_.entries[index].mark, mark, "mark: marked");
    wake();
  }
  // Hides an entry that this member holds from all searches: its content is damaged.
  void spoil(std::uint32_t index) { set(layout_.entries[index].mark, Entry::dropped, "spoil: marked"); }
  void set_used(std::uint32_t index) REQUIRES(mutex) { layout_.entries[index].at = now_ms(); }
  // Returns the entry of content that is kept.
  [[nodiscard]] std::optional<std::uint32_t> find_kept(const Digest& digest, std::size_t content_bytes) const
      REQUIRES(mutex) {
    for (std::size_t i = 0; i < kProbes; ++i) {
      const std::size_t index = (home(digest, content_bytes) + i) % kEntries;
      const Entry& entry = layout_.entries[index];
      if (entry.state == Entry::kept && is_of(entry, digest, content_bytes)) return static_cast<std::uint32_t>(index);
    }
    return std::nullopt;
  }
  // Holds an entry that is kept, without its memory being mapped.
  void hold(std::uint32_t index) REQUIRES(mutex) {
    Entry& entry = layout_.entries[index];
    set(entry.holders, entry.holders | me(), "hold: held");
  }
  // Returns whether a member that is no keeper holds an entry.
  [[nodiscard]] bool is_used(std::uint32_t index) const REQUIRES(mutex) {
    return (layout_.entries[index].holders & ~keepers()) != 0;
  }
  // Returns whether there are keepers, and none of them holds an entry.
  [[nodiscard]] bool lacks_keeper(std::uint32_t index) const REQUIRES(mutex) {
    return keepers() != 0 && (layout_.entries[index].holders & keepers()) == 0;
  }
  // Asks keepers to drop `bytes`. Returns false if there are no keepers.
  [[nodiscard]] bool ask_keepers(std::size_t bytes) REQUIRES(mutex) {
    layout_.wanted = bytes;
    if (keepers() == 0) return false;
    wake();
    return true;
  }
  // Returns the bytes that keepers were asked to drop since the last call.
  [[nodiscard]] std::size_t take_wanted() REQUIRES(mutex) { return layout_.wanted.exchange(0); }

  // Returns a new slab for this member to make: of `at_most` bytes, or what one slab or the limit allows; nothing if
  // that is less than `at_least`. Members use it after end_slab().
  [[nodiscard]] std::optional<std::uint32_t> begin_slab(std::size_t at_least, std::size_t at_most) REQUIRES(mutex) {
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
  void end_slab(std::uint32_t slab) REQUIRES(mutex) {
    set(layout_.slabs[slab].state, Slab::present, "slab: made");
    wake();
  }
  // Notes that this member maps one more complete slab, and returns it; nothing if it has mapped them all.
  [[nodiscard]] std::optional<std::uint32_t> map_another() REQUIRES(mutex) {
    const auto others = present_slabs([this](std::uint32_t, const Slab& slab) { return (slab.mapped & me()) == 0; });
    if (others.empty()) return std::nullopt;
    layout_.slabs[others.front()].mapped |= me();
    return others.front();
  }
  // Notes that this member unmaps the complete slabs in which no part of `entries` lies, and returns those slabs.
  [[nodiscard]] std::vector<std::uint32_t> unmap_unneeded(const std::vector<std::uint32_t>& entries) REQUIRES(mutex) {
    std::set<std::uint32_t> needed;
    for (const std::uint32_t entry : entries) {
      for (const auto& piece : pieces_of(entry)) needed.insert(piece.slab);
    }
    const std::vector<std::uint32_t> unneeded = present_slabs(
        [&](std::uint32_t index, const Slab& slab) { return (slab.mapped & me()) != 0 && needed.count(index) == 0; });
    for (const std::uint32_t index : unneeded) layout_.slabs[index].mapped &= ~me();
    return unneeded;
  }
  // Returns the slabs that no member uses. This member is to free their pages, then to call end_freeing() for each.
  [[nodiscard]] std::vector<std::uint32_t> begin_freeing() REQUIRES(mutex) {
    const std::vector<std::uint32_t> unused = present_slabs(
        [](std::uint32_t, const Slab& slab) { return slab.mapped == 0 && slab.free_grains == slab.grains; });
    for (const std::uint32_t index : unused) {
      layout_.slabs[index].member = member_;
      set(layout_.slabs[index].state, Slab::freeing, "slab: freeing");
    }
    return unused;
  }
  void end_freeing(std::uint32_t index) REQUIRES(mutex) {
    set(layout_.slabs[index].state, Slab::absent, "slab: freed");
    layout_.slab_bytes -= bytes_of(index);
  }

  // Waits until changes() is not `seen`, for `at_most`.
  void wait_for_change(std::uint32_t seen, std::chrono::milliseconds at_most) {
    const timespec time{at_most.count() / 1000, static_cast<long>(at_most.count() % 1000) * 1'000'000};
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&layout_.changes), FUTEX_WAIT, seen, &time, nullptr, 0);
  }
  [[nodiscard]] std::uint32_t changes() const { return layout_.changes; }
  // Counts a change, and wakes the processes that wait for one.
  void wake() {
    ++layout_.changes;
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&layout_.changes), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  [[nodiscard]] std::size_t slab_bytes() const { return layout_.slab_bytes; }
  [[nodiscard]] std::size_t used_bytes() const { return layout_.used_bytes; }
  [[nodiscard]] std::size_t limit_bytes() const { return layout_.limit_bytes; }
  [[nodiscard]] std::size_t members() const {
    return static_cast<std::size_t>(std::count_if(std::begin(layout_.members), std::end(layout_.members),
                                                  [](const auto& member) { return member.joined != 0; }));
  }
  // Return the stored bytes of an entry that this member holds, and the number of members that hold it.
  [[nodiscard]] std::size_t stored_bytes(std::uint32_t entry) const { return layout_.entries[entry].bytes; }
  [[nodiscard]] std::size_t holders(std::uint32_t entry) const {
    return std::max<std::size_t>(1, std::bitset<64>(layout_.entries[entry].holders).count());
  }
  [[nodiscard]] std::size_t bytes_of(std::uint32_t slab) const {
    return std::min(layout_.slabs[slab].grains * kGrain, kSlabBytes);
  }
  [[nodiscard]] const DigestKey& key() const { return layout_.key; }

 private:
  static constexpr char kMagic[16] = "memsaver store2";
  // The device of a dead process may still be writing the copies that were queued: eight blocks, 5 ms at 55 GB/s. The
  // kernel frees the mutexes of a process before its devices.
  static constexpr std::int64_t kLostFor = 500;  // ms
  static constexpr std::size_t kProbes = 64;     // places of content of one digest; half are free up to 512 GiB

  inline static const std::uint64_t kSizes[] = {sizeof(SharedLayout), kSlabBytes, kGrain, kSizeUnit, kPackedVersion};

  // Returns the first place of an entry.
  [[nodiscard]] static std::size_t home(const Digest& digest, std::size_t content_bytes) {
    return digest.lane0 % (content_bytes == 0 ? kTexts : kEntries);
  }
  [[nodiscard]] static bool is_of(const Entry& entry, const Digest& digest, std::size_t content_bytes) {
    return entry.lane0 == digest.lane0 && entry.lane1 == digest.lane1 && entry.content_bytes == content_bytes &&
           entry.mark != Entry::dropped;
  }
  [[nodiscard]] std::uint64_t keepers() const {
    std::uint64_t bits = 0;
    for (std::uint32_t i = 0; i < kMembers; ++i) {
      if (layout_.members[i].joined == SharedLayout::Member::keeper) bits |= std::uint64_t{1} << i;
    }
    return bits;
  }
  [[nodiscard]] static std::int64_t now_ms() {
    using namespace std::chrono;
    return duration_cast<milliseconds>(steady_clock::now().time_since_epoch()).count();
  }
  static void step(const char* point) {
    if (const auto hook = shared_step.load(std::memory_order_relaxed)) hook(point);
  }
  // Stores one atomic, by which a change becomes valid; then a step.
  template <typename Value, typename New>
  static void set(std::atomic<Value>& value, New to, const char* point) {
    value = to;
    step(point);
  }
  // Computes anew the fields marked "computed", after an owner of the mutex has died.
  void repair() REQUIRES(mutex) {
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
      } else if (entry.holders == 0) {  // its last holder died before it set the state
        entry.state == Entry::writing ? lose_entry(entry) : free_entry(entry);
      }
    }
  }
  // Ends every hold, claim and mapping of a member; slabs that it was making or freeing become unused ones.
  void drop_all_of(std::uint32_t member) REQUIRES(mutex) {
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
  void free_entry(Entry& entry) REQUIRES(mutex) {
    const std::uint32_t count = entry.pieces;
    set(entry.state, Entry::free, "free: entry");
    mark(entry, count, false);
  }
  void lose_entry(Entry& entry) REQUIRES(mutex) {
    entry.at = now_ms();
    set(entry.state, Entry::lost, "lose: entry");
    ++layout_.lost;
  }
  void free_lost() REQUIRES(mutex) {
    if (layout_.lost == 0) return;
    for (auto& entry : layout_.entries) {
      if (entry.state != Entry::lost || now_ms() - entry.at < kLostFor) continue;
      free_entry(entry);
      --layout_.lost;
    }
  }
  void mark(const Piece& piece, bool taken) REQUIRES(mutex) {
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
  // Marks the first pieces of an entry.
  void mark(const Entry& entry, std::uint32_t pieces, bool taken) REQUIRES(mutex) {
    for (std::uint32_t i = 0; i < std::min<std::uint32_t>(pieces, kPieces); ++i) mark(entry.piece[i], taken);
  }
  template <typename Wanted>
  [[nodiscard]] std::vector<std::uint32_t> present_slabs(const Wanted& wanted) const REQUIRES(mutex) {
    std::vector<std::uint32_t> slabs;
    for (std::uint32_t i = 0; i < layout_.slabs_end; ++i) {
      if (layout_.slabs[i].state == Slab::present && wanted(i, layout_.slabs[i])) slabs.push_back(i);
    }
    return slabs;
  }
  // Returns whether a process of this version can have written a kept entry with these sizes.
  [[nodiscard]] static bool is_sound(const Entry& entry, const std::vector<Piece>& pieces) {
    std::size_t grains = 0;
    for (const auto& piece : pieces) grains += piece.grains;
    if (entry.bytes > grains * kGrain || entry.packed_bytes > packed_limit(entry.content_bytes)) return false;
    return (entry.packed_bytes != 0 ? entry.packed_bytes : entry.content_bytes) <= entry.bytes;
  }
  [[nodiscard]] bool is_sound(const Piece& piece) const {
    if (piece.slab >= kSlabs || piece.grains == 0) return false;
    const std::size_t grains = bytes_of(piece.slab) / kGrain;
    return piece.first < grains && piece.grains <= grains - piece.first;
  }
  // Returns the longest free run of a slab, or the first one of `enough` grains.
  [[nodiscard]] Piece longest_run(std::uint32_t index, std::size_t enough) const REQUIRES(mutex) {
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
  [[nodiscard]] std::uint64_t me() const { return std::uint64_t{1} << member_; }

  SharedLayout& layout_;
  std::uint32_t member_ = 0;
};

}  // namespace memsaver
