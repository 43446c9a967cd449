#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backup/block.hpp"
#include "backup/host_pool.hpp"
#include "backup/shared_door.hpp"
#include "backup/shared_index.hpp"
#include "driver/driver.hpp"
#include "support/mutex.hpp"

namespace memsaver {

struct SharedStoreStatus {
  std::string name;             // empty: this process takes part in none
  std::size_t processes = 0;    // that take part
  std::size_t held_bytes = 0;   // of blocks that this process uses
  std::size_t share_bytes = 0;  // the same, each block divided among those that use it
  std::size_t used_bytes = 0;   // of blocks that any process uses
  std::size_t total_bytes = 0;  // memory of the store
  std::size_t limit_bytes = 0;
  std::size_t pinned_bytes = 0;  // of it, ready for copies in this process
};

// Host memory that several processes of one user share, and that holds a block of equal content once.
//
// docs/architecture.md ("The shared store") describes how. Any thread may call any function; one that needs the index
// waits at most a second for a process that was stopped while it changed it, and then answers Found::no_room, or does
// its change later.
class SharedStore {
 public:
  using Found = SharedIndex::Found;
  using Answer = SharedIndex::Answer;

  // Takes part in the store of this name, or founds it; the founder's limit holds for all. Throws
  // ErrorKind::configuration if neither is possible, which takes a few seconds if processes of the store do not answer.
  SharedStore(Driver& driver, const std::string& name, std::size_t limit_bytes);
  SharedStore(const SharedStore&) = delete;
  SharedStore& operator=(const SharedStore&) = delete;
  // Lets go of everything. Does nothing in a forked child, which takes no part.
  ~SharedStore();

  // The key of all digests in the store.
  [[nodiscard]] const DigestKey& key() const { return index_->key(); }

  // Looks for content of this digest, see SharedIndex::want(). `entry` of the answer is this process's until give().
  [[nodiscard]] Answer want(const Digest& digest, std::size_t content_bytes, bool alone = false);
  // The addresses of what was found kept. Throws ErrorKind::out_of_host_memory.
  [[nodiscard]] std::vector<HostRange> memory_of(const Answer& kept);
  // Pinned memory for what was claimed, rounded up to pages; `expected` bytes will be needed in all. The content is
  // undefined, but zero beyond `bytes`. Nothing if the index is not free for long. Throws
  // ErrorKind::out_of_host_memory, with nothing taken.
  [[nodiscard]] std::vector<HostRange> take(std::uint32_t entry, std::size_t bytes, std::size_t expected,
                                            int numa_node);
  // What was claimed is written: from now on others find it.
  void publish(std::uint32_t entry, std::size_t packed_bytes = 0);
  // Ends the use of an entry, kept or claimed. Makes no system call: settle() does it.
  void give(std::uint32_t entry);
  void settle();
  // Waits until something was published or given up since `changes()` was `seen`, at most 10 ms. What a dead process
  // was writing is given up then.
  void wait_for_change(std::uint32_t seen);
  [[nodiscard]] std::uint32_t changes() const { return index_->changes(); }

  // Registers the memory of entries with the driver, for fast copies.
  void pin(const std::vector<HostRange>& ranges) EXCLUDES(mutex_, pin_mutex_);
  // In the background: makes and pins memory, so that `bytes` beyond what this process uses can be kept as far as no
  // other process uses it for other content.
  void prepare_beyond(std::size_t bytes);
  // In the background: pins what this process uses, and gives back what is more than a little beyond.
  void tidy();
  // Returns when nothing is prepared any more. Throws the error that stopped it.
  void wait_until_prepared();
  // Gives back memory that nobody uses, as far as it is up to this process.
  void trim();

  // Of an entry of this process, as stored.
  [[nodiscard]] std::size_t stored_bytes(std::uint32_t entry) const { return index_->stored_bytes(entry); }
  // Never waits for another process.
  [[nodiscard]] SharedStoreStatus status() const;

 private:
  friend struct SharedStoreForks;
  // A slab as this process has it: mapped, and registered with the driver or not.
  struct Mapped {
    std::uintptr_t address;
    std::size_t bytes;
    bool pinned = false;
  };
  struct Owed {
    enum What { drop, publish, made, gone } what;
    std::uint32_t which;
    std::size_t packed_bytes = 0;
  };
  SharedStore(Driver& driver, const std::string& name) : driver_(driver), name_(name), door_(name) {}
  void join(std::size_t limit_bytes);
  void open_file(std::size_t limit_bytes);
  void keep();
  [[nodiscard]] bool lock_index() TRY_ACQUIRE(true, index_->mutex);
  void owe(Owed change) EXCLUDES(mutex_);
  // Moves from uses_ to the index what drops leave without a use.
  void apply(const Owed& change) REQUIRES(index_->mutex) EXCLUDES(mutex_);

  // Maps the slab unless it is. Throws ErrorKind::out_of_host_memory.
  HostRange map(std::uint32_t slab) EXCLUDES(mutex_);
  // The addresses of pieces, `bytes` in all; maps their slabs.
  [[nodiscard]] std::vector<HostRange> map(const std::vector<SharedIndex::Piece>& pieces, std::size_t bytes);
  // Maps one more slab that other processes made, if there is any.
  [[nodiscard]] bool map_another() EXCLUDES(map_mutex_);
  // Registers those of the mapped slabs that are not. Throws as Driver::register_host().
  void pin_if(const std::function<bool(std::uint32_t, const Mapped&)>& wanted) EXCLUDES(mutex_, pin_mutex_);
  // Forgets those of the slabs that are mapped, so that map() maps them anew, for the caller to pass to unmap().
  [[nodiscard]] std::vector<Mapped> forget(const std::vector<std::uint32_t>& slabs) REQUIRES(pin_mutex_)
      EXCLUDES(mutex_);
  // Unregisters and unmaps. What the driver does not unregister is tried again with the next ones.
  void unmap(const std::vector<Mapped>& slabs) EXCLUDES(mutex_);

  // Completes a slab that begin_slab() gave this process. When it throws, the slab is complete, too, or given up:
  // nobody uses one without pages, because a write to it may find no memory.
  void make_slab(std::uint32_t slab, int numa_node);
  void punch(std::uint32_t slab);
  // Calls `between` before each slab: to give one back takes 20 ms.
  void give_back_unused(const std::function<void()>& between);
  void work_later();
  void work();
  void prepare_now();
  void abandon();

  const pid_t process_ = getpid();
  Driver& driver_;
  const std::string name_;
  StoreDoor door_;
  int file_ = -1;
  SharedLayout* layout_ = nullptr;
  std::unique_ptr<SharedIndex> index_;
  std::atomic<bool> stuck_{false};  // the index was not free for long
  std::atomic<bool> ending_{false};
  std::thread keeper_;  // takes part for this process: alive as long as it is

  mutable Mutex mutex_;  // taken after that of the index, and never held across a wait
  std::map<std::uint32_t, std::size_t> uses_ GUARDED_BY(mutex_);  // of entries, by blocks of this process
  std::vector<Owed> owed_ GUARDED_BY(mutex_);                     // changes for settle(), in order
  std::map<std::uint32_t, Mapped> slabs_ GUARDED_BY(mutex_);
  std::vector<Mapped> still_pinned_ GUARDED_BY(mutex_);  // of slabs that were forgotten

  Mutex map_mutex_;                          // a slab without entries is mapped, or given up
  Mutex pin_mutex_ ACQUIRED_BEFORE(mutex_);  // a slab is registered: one at a time
  Mutex work_mutex_;
  std::condition_variable_any worked_;
  std::thread worker_ GUARDED_BY(work_mutex_);
  bool working_ GUARDED_BY(work_mutex_) = false;
  bool again_ GUARDED_BY(work_mutex_) = false;
  std::exception_ptr work_failure_ GUARDED_BY(work_mutex_);
  std::atomic<std::size_t> target_{0};
  std::atomic<bool> tidy_wanted_{false};
};

// Ends a block's use of host memory.
void give_host_memory(Block& block, HostPool& pool, SharedStore* store);

}  // namespace memsaver
