#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "support/digest.hpp"
#include "support/robust_mutex.hpp"
#include "support/sizes.hpp"

namespace memsaver {

inline constexpr std::size_t kSlabBytes = 128 * kSizeUnit;  // as large as a slice of HostPool, for the same reasons
inline constexpr std::size_t kGrain = std::max<std::size_t>(kSizeUnit / 16, 4096);
inline constexpr std::size_t kSlabGrains = kSlabBytes / kGrain;
inline constexpr std::size_t kSlabs = 8192;       // 1 TiB
inline constexpr std::size_t kEntries = 1 << 15;  // 1 TiB of whole blocks
inline constexpr std::size_t kMembers = 64;
inline constexpr std::size_t kPieces = 8;  // of one block: memory is used up although blocks differ in size

// The beginning of the memory file that the processes of a store share: which content it holds, where, and for which of
// them. Behind it lie the slabs; a hole in the file takes no memory. A change becomes valid by one store of an atomic,
// so that a process may be killed between any two; what can be computed from the rest is computed anew then.
struct SharedLayout {
  struct Member {
    pthread_mutex_t alive;  // the liveness mutex: held by a thread of the process as long as it is a member
    std::atomic<std::uint32_t> joined;
  };
  struct Slab {
    enum State : std::uint32_t { absent, making, present, freeing };
    std::atomic<std::uint32_t> state;
    std::uint32_t member;  // that makes or frees it
    std::uint32_t grains;
    std::uint32_t free_grains;                     // computed
    std::atomic<std::uint64_t> mapped;             // by these members; its pages are kept until there is none
    std::uint64_t taken[(kSlabGrains + 63) / 64];  // computed
  };
  struct Piece {
    std::uint32_t slab;
    std::uint32_t first;  // grain
    std::uint32_t grains;
  };
  struct Entry {
    enum State : std::uint32_t { free, writing, kept, lost };
    std::atomic<std::uint32_t> state;
    std::atomic<std::uint64_t> holders;  // members; while writing the writer alone
    std::uint64_t lane0, lane1;          // the digest of the content
    std::uint64_t content_bytes;
    std::uint64_t bytes;                // as stored
    std::uint64_t packed_bytes;         // of what is stored, if it is packed
    std::int64_t lost_at;               // ms: its writer was found dead then
    std::atomic<std::uint32_t> pieces;  // how many of `piece` hold it, in order
    Piece piece[kPieces];
  };

  char magic[16];
  std::uint64_t sizes[5];  // of builds that understand each other
  DigestKey key;
  std::uint64_t limit_bytes;
  pthread_mutex_t mutex;               // guards all below
  std::atomic<std::uint32_t> changes;  // a futex: counts what another process may wait for
  std::atomic<std::uint32_t> slabs_end;
  std::atomic<std::uint64_t> slab_bytes;  // computed; memory of all slabs
  std::atomic<std::uint64_t> used_bytes;  // computed; of it, taken by entries
  std::atomic<std::uint32_t> lost;        // computed; entries
  Member members[kMembers];
  Slab slabs[kSlabs];
  Entry entries[kEntries];

  static constexpr std::size_t slabs_at() { return round_up(sizeof(SharedLayout), std::size_t{2} << 20); }
  static constexpr std::size_t file_bytes() { return slabs_at() + kSlabs * kSlabBytes; }
};

// Called at each point at which tests end the process.
extern std::atomic<void (*)(const char* point)> shared_step;

// One member's operations on a SharedLayout, which it does not own. None makes a system call except to wake and to
// wait. Functions that need no mutex may be called by any thread.
class SharedIndex {
 public:
  using Slab = SharedLayout::Slab;
  using Entry = SharedLayout::Entry;
  using Piece = SharedLayout::Piece;

  // Makes a layout of new memory that is zero. Throws configuration.
  static void found(SharedLayout& layout, const DigestKey& key, std::size_t limit_bytes);
  // Returns whether found() with equal sizes has completed it.
  [[nodiscard]] static bool is_valid(const SharedLayout& layout);

  explicit SharedIndex(SharedLayout& layout)
      : mutex(layout.mutex, [this]() NO_THREAD_SAFETY_ANALYSIS { repair(); }), layout_(layout) {}

  RobustMutex mutex;

  // Makes this process a member, for which the calling thread holds the liveness mutex from now on. Returns false if
  // there are kMembers already.
  [[nodiscard]] bool join() REQUIRES(mutex);
  // Drops all that this member has.
  void drop_all() REQUIRES(mutex) { drop_all_of(member_); }
  // Unregisters this member, after drop_all(). Only the thread that joined may call it.
  void leave() REQUIRES(mutex);
  // Drops what dead members had.
  void drop_dead_members() REQUIRES(mutex);

  enum class Found {
    kept,     // this member holds the content from now on
    claimed,  // no process has it, and this member is to write it
    awaited,  // another member is writing it
    no_room,  // the index is full
  };
  struct Answer {
    Found found;
    std::uint32_t entry = 0;       // kept, claimed
    std::vector<Piece> pieces;     // kept: that hold it
    std::size_t bytes = 0;         // kept: as stored
    std::size_t packed_bytes = 0;  // kept: 0 unless packed
  };
  // Looks for content; claims it even if another member is writing it if `alone`.
  [[nodiscard]] Answer find_or_claim(const Digest& digest, std::size_t content_bytes, bool alone) REQUIRES(mutex);
  // Takes memory for a claim. Returns false, with nothing taken, if the slabs have too little.
  [[nodiscard]] bool take(std::uint32_t entry, std::size_t bytes) REQUIRES(mutex);
  // Lets other members find a claim whose content is written.
  void publish(std::uint32_t entry, std::size_t packed_bytes) REQUIRES(mutex);
  // Ends this member's hold or claim.
  void drop(std::uint32_t entry) REQUIRES(mutex);
  // Returns the pieces of an entry that this member holds or writes, checked to lie in slabs.
  [[nodiscard]] std::vector<Piece> pieces_of(std::uint32_t entry) const REQUIRES(mutex);

  // Returns a new slab for this member to make, of as many bytes as the limit allows; nothing if it allows less than
  // `at_least`. Other members use it after end_slab().
  [[nodiscard]] std::optional<std::uint32_t> begin_slab(std::size_t at_least, std::size_t at_most) REQUIRES(mutex);
  void end_slab(std::uint32_t slab) REQUIRES(mutex);
  // Notes that this member has the slab mapped.
  void set_mapped(std::uint32_t slab) REQUIRES(mutex) { layout_.slabs[slab].mapped |= me(); }
  // Notes that this member has those complete slabs no longer mapped that it needs for none of `entries`, and returns
  // them.
  [[nodiscard]] std::vector<std::uint32_t> unmap_unneeded(const std::vector<std::uint32_t>& entries) REQUIRES(mutex);
  // Returns the slabs that no member uses. This member is to free their pages, then to call end_freeing() for each.
  [[nodiscard]] std::vector<std::uint32_t> begin_freeing() REQUIRES(mutex);
  void end_freeing(std::uint32_t slab) REQUIRES(mutex);
  // Returns the complete slabs that this member has not mapped.
  [[nodiscard]] std::vector<std::uint32_t> unmapped_slabs() const REQUIRES(mutex);

  // Waits until changes() is not `seen`, for `at_most`.
  void wait_for_change(std::uint32_t seen, std::chrono::milliseconds at_most);
  [[nodiscard]] std::uint32_t changes() const { return layout_.changes; }
  // Counts a change, and wakes the processes that wait for one.
  void wake();

  [[nodiscard]] std::size_t slab_bytes() const { return layout_.slab_bytes; }
  [[nodiscard]] std::size_t used_bytes() const { return layout_.used_bytes; }
  [[nodiscard]] std::size_t limit_bytes() const { return layout_.limit_bytes; }
  [[nodiscard]] std::size_t members() const;
  // Return the stored bytes of an entry that this member holds, and how many members hold it.
  [[nodiscard]] std::size_t stored_bytes(std::uint32_t entry) const { return layout_.entries[entry].bytes; }
  [[nodiscard]] std::size_t holders(std::uint32_t entry) const;
  [[nodiscard]] std::size_t bytes_of(std::uint32_t slab) const {
    return std::min<std::size_t>(layout_.slabs[slab].grains, kSlabGrains) * kGrain;
  }
  [[nodiscard]] const DigestKey& key() const { return layout_.key; }

 private:
  static void step(const char* point);
  // Stores one atomic, by which a change becomes valid; then a step.
  template <typename Value, typename New>
  static void set(std::atomic<Value>& value, New to, const char* point);
  void repair() REQUIRES(mutex);
  void drop_all_of(std::uint32_t member) REQUIRES(mutex);
  void free_entry(Entry& entry) REQUIRES(mutex);
  void lose_entry(Entry& entry) REQUIRES(mutex);
  void free_lost() REQUIRES(mutex);
  void mark(const Piece& piece, bool taken) REQUIRES(mutex);
  // Marks the first pieces of an entry.
  void mark(const Entry& entry, std::uint32_t pieces, bool taken) REQUIRES(mutex);
  template <typename Wanted>
  [[nodiscard]] std::vector<std::uint32_t> present_slabs(const Wanted& wanted) const REQUIRES(mutex);
  [[nodiscard]] static bool is_sound(const Entry& entry, const std::vector<Piece>& pieces);
  [[nodiscard]] bool is_sound(const Piece& piece) const;
  [[nodiscard]] Piece longest_run(std::uint32_t slab, std::size_t enough) const REQUIRES(mutex);
  [[nodiscard]] std::uint64_t me() const { return std::uint64_t{1} << member_; }

  SharedLayout& layout_;
  std::uint32_t member_ = 0;
};

}  // namespace memsaver
