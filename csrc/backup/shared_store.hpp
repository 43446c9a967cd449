#pragma once

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "backup/block.hpp"
#include "backup/host_pool.hpp"
#include "backup/shared_index.hpp"
#include "backup/store_sockets.hpp"
#include "driver/driver.hpp"
#include "driver/handles.hpp"
#include "support/background.hpp"
#include "support/mutex.hpp"

namespace memsaver {

struct SharedStoreStatus {
  std::string name;             // empty: this process uses no store
  std::size_t processes = 0;    // that use it
  std::size_t held_bytes = 0;   // of blocks that this process uses
  std::size_t share_bytes = 0;  // the same, each block divided among the processes that use it
  std::size_t used_bytes = 0;   // of blocks that any process uses
  std::size_t total_bytes = 0;  // memory of the store
  std::size_t limit_bytes = 0;
  std::size_t pinned_bytes = 0;  // of it, ready for copies in this process
};

// Owns one process's membership in a store: host memory that processes of one user share, and that holds a block of
// equal content once. docs/architecture.md ("The shared store") describes how.
//
// Any thread may call any function. One that needs the index waits at most a second for a process that was stopped
// while it changed the index; then it returns Found::no_room, or makes its change later.
class SharedStore {
 public:
  using Found = SharedIndex::Found;
  using Answer = SharedIndex::Answer;

  // Joins the store of this name, or founds it; the founder's limit holds for all. Throws configuration if neither is
  // possible, which takes a few seconds if processes of the store do not answer.
  SharedStore(Driver& driver, const std::string& name, std::size_t limit_bytes);
  // Drops all that this process holds, and leaves. Does nothing in a forked child, which is no member.
  ~SharedStore();

  // Returns the key of all digests in the store.
  [[nodiscard]] const DigestKey& key() const { return index_->key(); }

  // Looks for content, as SharedIndex::find_or_claim(). The entry in the answer is this process's until give().
  [[nodiscard]] Answer find_or_claim(const Digest& digest, std::size_t content_bytes, bool alone = false);
  // Returns the addresses of what was found kept. Throws out_of_host_memory.
  [[nodiscard]] std::vector<HostRange> memory_of(const Answer& kept) { return map(kept.pieces, to_pages(kept.bytes)); }
  // Takes pinned memory for what was claimed, rounded up to pages; `expected` bytes will be needed in all. The content
  // is undefined, but zero beyond `bytes`. Returns nothing if the index is not free. Throws out_of_host_memory or
  // driver errors: the claim has no memory that its caller knows.
  [[nodiscard]] std::vector<HostRange> take(std::uint32_t entry, std::size_t bytes, std::size_t expected,
                                            int numa_node);
  // Lets other processes find what was claimed: its content is written.
  void publish(std::uint32_t entry, std::size_t packed_bytes = 0);
  // Ends the use of an entry, kept or claimed. Makes no system call: apply_pending() does.
  void give(std::uint32_t entry) {
    add_pending([this, entry]() REQUIRES(index_->mutex) { drop_use(entry); });
  }
  // Makes the changes of the index that are pending, in order.
  void apply_pending();
  // Waits until another process published or gave up something since changes() was `seen`, for 10 ms, and then gives up
  // what dead processes were writing.
  void wait_for_change(std::uint32_t seen);
  [[nodiscard]] std::uint32_t changes() const { return index_->changes(); }

  // Registers the memory of entries with the driver, for fast copies. Throws as Driver::register_host(): some of it may
  // be registered.
  void pin(const std::vector<HostRange>& ranges) EXCLUDES(mutex_, pin_mutex_);
  // Makes and pins memory in the background, so that `bytes` beyond what this process uses can be kept, as far as no
  // other process uses it for other content.
  void prepare_beyond(std::size_t bytes);
  // Pins what this process uses in the background, and gives back what exceeds that by more than a little.
  void tidy();
  // Waits until nothing is being prepared. Throws what stopped it.
  void wait_until_prepared() { background_.wait(); }
  // Gives back the memory that no process uses, and what this one has mapped and does not need.
  void trim();

  // Returns the bytes of an entry of this process, as stored.
  [[nodiscard]] std::size_t stored_bytes(std::uint32_t entry) const { return index_->stored_bytes(entry); }
  // Never waits for another process.
  [[nodiscard]] SharedStoreStatus status() const;

 private:
  friend struct SharedStoreForks;
  using Slabs = std::deque<HostMapping>;

  SharedStore(Driver& driver, const std::string& name) : driver_(driver), name_(name), sockets_(name) {}
  // Throws configuration: the destructor undoes what was done.
  void join(std::size_t limit_bytes);
  void open_file(std::size_t limit_bytes);
  // The rest of the life of the thread that joined.
  void run_member();
  // Returns false if the index was not free for a second; then does not wait again until it was free.
  [[nodiscard]] bool lock_index() TRY_ACQUIRE(true, index_->mutex);
  // Adds a change of the index, which is made as soon as the index is free.
  void add_pending(std::function<void()> change) EXCLUDES(mutex_);
  // Reaches the index only if it leaves no use of the entry in this process.
  void drop_use(std::uint32_t entry) REQUIRES(index_->mutex) EXCLUDES(mutex_);

  // Maps the slab unless it is. Throws out_of_host_memory.
  HostRange map(std::uint32_t slab) EXCLUDES(mutex_);
  // Maps the slabs of pieces, and returns the addresses of the pieces, `bytes` in all. Throws out_of_host_memory.
  [[nodiscard]] std::vector<HostRange> map(const std::vector<SharedIndex::Piece>& pieces, std::size_t bytes);
  // Maps one more slab that other processes made. Returns false if there is none. Throws out_of_host_memory.
  [[nodiscard]] bool map_another() EXCLUDES(map_mutex_);
  // Registers those mapped slabs that are wanted and not registered. Throws as pin().
  void pin_if(const std::function<bool(std::uint32_t, const HostMapping&)>& wanted) EXCLUDES(mutex_, pin_mutex_);
  // Takes those of the slabs that are mapped out of slabs_, so that map() maps them anew, and returns them.
  [[nodiscard]] Slabs take_out(const std::vector<std::uint32_t>& slabs) REQUIRES(pin_mutex_) EXCLUDES(mutex_);
  // Unregisters and unmaps. The next call tries again what the driver does not unregister.
  void unmap(Slabs slabs) EXCLUDES(mutex_);

  // Completes a slab that begin_slab() gave this process. Throws out_of_host_memory or driver errors: the slab is
  // complete, too, or given up. No process uses one without pages, because a write to it may find no memory.
  void make_slab(std::uint32_t slab, int numa_node);
  void free_pages(std::uint32_t slab);
  // Calls `between` before each slab: to free one takes 20 ms.
  void free_unused(const std::function<void()>& between);
  // Lets work() run in the background, once more if it is running.
  void work_later();
  void work();
  // Processes that prepare at the same time make slabs side by side, together no more than the one that needs most.
  void prepare_now();
  // In a forked child: closes what it inherited.
  void abandon();

  const pid_t process_ = getpid();
  Driver& driver_;
  const std::string name_;
  StoreSockets sockets_;
  int file_ = -1;
  SharedLayout* layout_ = nullptr;
  std::unique_ptr<SharedIndex> index_;
  std::atomic<bool> index_busy_{false};  // the last lock_index() failed
  std::atomic<bool> ending_{false};
  std::thread member_thread_;  // holds the liveness mutex of this process, and serves the store's file to others

  mutable Mutex mutex_;  // taken after that of the index, and never held across a wait
  std::map<std::uint32_t, std::size_t> uses_ GUARDED_BY(mutex_);   // of entries, by blocks of this process
  std::vector<std::function<void()>> pending_ GUARDED_BY(mutex_);  // in order
  std::map<std::uint32_t, HostMapping> slabs_ GUARDED_BY(mutex_);
  Slabs still_pinned_ GUARDED_BY(mutex_);  // that unmap() failed to unregister

  Mutex map_mutex_;                          // held while a slab without entries is mapped, or given up
  Mutex pin_mutex_ ACQUIRED_BEFORE(mutex_);  // held while a slab is registered, and is in slabs_
  std::atomic<std::size_t> target_{0};
  std::atomic<bool> tidy_wanted_{false};
  Background background_{[this] { work(); }};
};

// Ends a block's use of host memory, of the pool or of the store. Makes no system call.
void give_host_memory(Block& block, HostPool& pool, SharedStore* store);

}  // namespace memsaver
