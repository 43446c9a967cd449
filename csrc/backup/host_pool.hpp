#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "backup/block.hpp"
#include "driver/driver.hpp"
#include "driver/handles.hpp"
#include "support/error.hpp"
#include "support/mutex.hpp"
#include "support/range_set.hpp"

namespace memsaver {

struct HostPoolStatus {
  std::size_t used_bytes;      // handed out
  std::size_t capacity_bytes;  // pinned and ready
  std::size_t target_bytes;    // capacity after the growth under way
  std::size_t limit_bytes;
};

// Returns out_of_host_memory with its advice; `whose` follows the name of the limit in it.
[[nodiscard]] Error short_of_memory(const std::string& what, std::size_t needed, std::size_t free,
                                    const std::string& whose = "");
// Throws such an error if this machine or its control group has less than `bytes` available. Pinned memory cannot be
// reclaimed: taking more would invoke the OOM killer.
void check_available(std::size_t bytes, const std::string& whose = "");

// Owns pinned host memory, as much as is requested. Any thread may call any function.
//
// Memory comes in slices that several threads make in parallel: mapped, with huge pages advised, on the NUMA node of
// the device, touched. Registering a slice holds a lock of the CUDA driver that copies and unmaps need too, so one
// thread at a time does it: while an operation waits for memory, the thread in take(), between its copies (on an H200
// the first release of 16 GiB ran at 26 to 32 GB/s with registrations from 6 to 16 other threads); otherwise the
// makers. A copy may not span two slices, so neither does a range that is handed out.
class HostPool {
 public:
  // `numa_node` of -1 leaves the placement to the kernel.
  HostPool(Driver& driver, std::size_t limit_bytes, int numa_node);
  // Waits for the maker threads.
  ~HostPool();

  // Throws out_of_host_memory if `bytes` more would exceed the limit, or if the part of them that is not pinned yet
  // exceeds the machine's available memory.
  void check(std::size_t bytes);

  // Grows in the background until `bytes` more could be handed out, as far as the machine has memory. take() throws
  // what stops it.
  void start_growth(std::size_t bytes);
  // Waits until no growth is under way. Throws what stopped the last one.
  void wait_for_growth();

  // Adds `change` to the number of operations that wait for memory. While there are some, take() registers slices.
  void add_urgent(int change);

  enum class Use {
    backup,     // within the limit; bounce memory does not count
    passing,    // bounce memory for files: within the limit besides backups
    must_pass,  // bounce memory without a limit: content in a file could not be restored without it
  };

  // Hands out ranges of `bytes` in all, rounded up to pages. Waits for a growth under way, and grows if there is none.
  // The content is undefined, but the last page is zero beyond `bytes`: after a write nothing is left of earlier
  // content. Throws out_of_host_memory or driver errors: nothing is taken.
  [[nodiscard]] std::vector<HostRange> take(std::size_t bytes, Use use = Use::backup);
  // Takes ranges back. Makes no system call.
  void give(const std::vector<HostRange>& ranges, Use use = Use::backup);

  // Owns bounce memory.
  class Bounce {
   public:
    // Throws as take().
    Bounce(HostPool& pool, std::size_t bytes, Use use) : ranges(pool.take(bytes, use)), pool_(pool) {}
    Bounce(const Bounce&) = delete;
    Bounce& operator=(const Bounce&) = delete;
    ~Bounce() { pool_.give(ranges, Use::passing); }

    const std::vector<HostRange> ranges;

   private:
    HostPool& pool_;
  };

  // Unpins and unmaps every unused slice, unless the pool is growing. Slices that the driver fails to unpin stay, with
  // a warning.
  void trim();
  // Lets trim() unpin nothing from now on: the process is ending, and the driver before it.
  void end() noexcept { ended_ = true; }

  [[nodiscard]] HostPoolStatus status() const;
  [[nodiscard]] int numa_node() const { return numa_node_; }

 private:
  struct Slice {
    HostMapping memory;
    RangeSet free;  // one set for each slice: ranges of adjacent slices never merge
  };
  [[nodiscard]] HostMapping make_slice(std::size_t bytes) const;
  void grow_to(std::size_t capacity) REQUIRES(mutex_);
  void grow();
  bool register_one() REQUIRES(mutex_);
  void add_slice(HostMapping slice) REQUIRES(mutex_);
  void wait_for_capacity(std::size_t bytes, Use use) REQUIRES(mutex_);
  [[nodiscard]] std::vector<HostRange> carve(std::size_t bytes) REQUIRES(mutex_);
  [[nodiscard]] bool is_growing() const REQUIRES(mutex_) { return growers_ > 0 || registering_; }

  Driver& driver_;
  const std::size_t limit_;
  const int numa_node_;
  std::atomic<bool> ended_ = false;

  mutable Mutex mutex_;
  std::condition_variable_any changed_;
  std::map<std::uintptr_t, Slice> slices_ GUARDED_BY(mutex_);
  std::size_t used_ GUARDED_BY(mutex_) = 0;
  std::size_t passing_ GUARDED_BY(mutex_) = 0;  // the bounce memory in used_
  std::size_t capacity_ GUARDED_BY(mutex_) = 0;
  std::size_t target_ GUARDED_BY(mutex_) = 0;
  std::deque<HostMapping> touched_ GUARDED_BY(mutex_);  // slices to be registered
  std::size_t under_way_ GUARDED_BY(mutex_) = 0;        // bytes of slices that are made, touched or being registered
  bool registering_ GUARDED_BY(mutex_) = false;
  int urgent_ GUARDED_BY(mutex_) = 0;
  std::size_t growers_ GUARDED_BY(mutex_) = 0;  // running maker threads
  bool stop_ GUARDED_BY(mutex_) = false;
  std::exception_ptr growth_failure_ GUARDED_BY(mutex_);
  std::vector<std::thread> threads_ GUARDED_BY(mutex_);
};

}  // namespace memsaver
