#pragma once

#include <condition_variable>
#include <deque>

#include "backup/block.hpp"
#include "driver/handles.hpp"
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
[[nodiscard]] inline Error short_of_memory(const std::string& what, std::size_t needed, std::size_t free,
                                           const std::string& whose = "") {
  return Error(ErrorKind::out_of_host_memory, what)
      .with_memory(needed, free)
      .with_advice("raise MEMSAVER_HOST_BACKUP_LIMIT" + whose +
                   ", free host memory, or choose another restore policy for the tag");
}
// Throws short_of_memory() if less than `bytes` are available, because pinned memory beyond that would invoke the OOM
// killer; backup if the available memory cannot be read.
inline void check_available(std::size_t bytes, const std::string& whose = "") {
  const std::size_t available = available_memory_bytes(bytes);
  if (bytes <= available) return;
  throw short_of_memory("this machine has too little memory for the backup", bytes, available, whose);
}

// Owns pinned host memory that grows on request. Any thread may call any function.
//
// Several maker threads make slices in parallel: each slice is mapped, advised to use huge pages, placed on the NUMA
// node of the device, and touched. Registering a slice holds a lock of the CUDA driver that copies and unmaps need too,
// so one thread at a time does it. While an operation waits for memory, that is the operation's thread, in take() and
// so between its copies; otherwise it is a maker thread. When 6 to 16 of these registered slices instead, the first
// release of 16 GiB ran at 26 to 32 GB/s on an H200. No copy or range spans two slices.
class HostPool {
 public:
  // `numa_node` of -1 leaves the placement to the kernel.
  HostPool(Driver& driver, std::size_t limit_bytes, int numa_node)
      : driver_(driver), limit_(limit_bytes), numa_node_(numa_node) {}
  // Waits for the maker threads.
  ~HostPool() {
    {
      const Lock lock(mutex_);
      stop_ = true;
    }
    for (auto& thread : threads_) thread.join();
  }

  // Throws out_of_host_memory if `bytes` more exceed the limit, or the memory to be pinned for them is not available;
  // backup as check_available().
  void check(std::size_t bytes) {
    std::size_t fresh = 0;
    {
      const Lock lock(mutex_);
      check_limit(bytes, used_);
      const std::size_t pinned = std::max(capacity_, target_);
      if (used_ + bytes > pinned) fresh = used_ + bytes - pinned;
    }
    if (fresh > 0) check_available(fresh);
  }

  // Grows in the background, up to the limit, until `bytes` more can be handed out. take() throws what stops that.
  void start_growth(std::size_t bytes) {
    const Lock lock(mutex_);
    grow_to(std::min(limit_, used_ + bytes));
  }
  // Waits until no growth is under way. Throws what stopped the last one.
  void wait_for_growth() {
    const Lock lock(mutex_);
    while (is_growing()) changed_.wait(mutex_);
    if (growth_failure_) std::rethrow_exception(growth_failure_);
  }

  // Adds `change` to the number of operations that wait for memory. While there are any, only take() registers slices.
  void add_urgent(int change) {
    const Lock lock(mutex_);
    urgent_ += change;
    changed_.notify_all();
  }

  enum class Use {
    backup,     // within the limit; bounce memory does not count
    passing,    // bounce memory for files: within the limit besides backups
    must_pass,  // bounce memory without a limit: content in a file could not be restored without it
  };

  // Hands out ranges of `bytes` in all, rounded up to pages. Waits for a growth under way, and grows if there is none.
  // The content is undefined, but the last page is zero beyond `bytes`: after a write nothing is left of earlier
  // content. Throws out_of_host_memory, backup (as check_available()) or driver errors: nothing is taken.
  [[nodiscard]] std::vector<HostRange> take(std::size_t bytes, Use use = Use::backup) {
    const std::size_t whole = to_pages(bytes);
    const Lock lock(mutex_);
    wait_for_capacity(whole, use);
    const std::vector<HostRange> ranges = carve(whole);
    used_ += whole;
    if (use != Use::backup) passing_ += whole;
    zero_rest(ranges, bytes);
    return ranges;
  }
  // Takes ranges back. Makes no system call.
  void give(const std::vector<HostRange>& ranges, Use use = Use::backup) {
    const Lock lock(mutex_);
    for (const auto& range : ranges) {
      std::prev(slices_.upper_bound(range.address))->second.free.add(range.address, range.bytes);
      used_ -= range.bytes;
      if (use != Use::backup) passing_ -= range.bytes;
    }
  }

  class Bounce {  // owns bounce memory
   public:
    // Throws as take().
    Bounce(HostPool& pool, std::size_t bytes, Use use) : ranges(pool.take(bytes, use)), pool_(pool) {}
    Bounce(const Bounce&) = delete;
    ~Bounce() { pool_.give(ranges, Use::passing); }

    const std::vector<HostRange> ranges;

   private:
    HostPool& pool_;
  };

  // Unpins and unmaps unused slices, unless the pool is growing. Warns of slices that the driver does not unpin.
  void trim() {
    std::deque<HostMapping> touched;
    std::deque<HostMapping> pinned;
    {
      const Lock lock(mutex_);
      if (is_growing()) return;
      touched.swap(touched_);
      for (const auto& slice : touched) under_way_ -= slice.bytes();
      for (auto at = slices_.begin(); at != slices_.end();) {
        Slice& slice = at->second;
        const bool unused = slice.free.total_bytes() == slice.memory.bytes();
        if (unused) {
          capacity_ -= slice.memory.bytes();
          pinned.push_back(std::move(slice.memory));
        }
        at = unused ? slices_.erase(at) : std::next(at);
      }
      target_ = capacity_;
    }
    touched.clear();
    // Without the lock: status() must not wait for the driver.
    for (; !pinned.empty(); pinned.pop_front()) {
      HostMapping& slice = pinned.front();
      try {
        if (!ended_) slice.unpin();
      } catch (const std::exception& error) {
        if (!ended_) warn(std::string("a slice of backup memory stays pinned: ") + error.what());
      }
      if (!slice.pinned()) continue;
      const Lock lock(mutex_);
      add_slice(std::move(slice));
      target_ = std::max(target_, capacity_);
    }
  }
  // Lets trim() unpin nothing from now on: the process is ending, and its driver may be gone already.
  void end() noexcept { ended_ = true; }

  [[nodiscard]] HostPoolStatus status() const {
    const Lock lock(mutex_);
    return {used_, capacity_, std::max(target_, capacity_), limit_};
  }
  [[nodiscard]] int numa_node() const { return numa_node_; }

 private:
  // First release of 31 GiB on an H200 with 16 cores: 10 threads and 128 MiB slices ran at 40 to 42 GB/s, 8 threads at
  // 41. 12 threads and 64 MiB slices ran at 36; 15 threads at 26, as the thread in take(), which registers and copies,
  // lacked a core. If little is missing, slices are smaller, so that all threads make some and the first is ready soon.
  inline static const std::size_t kSliceBytes = 128 * kSizeUnit;
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  static constexpr std::size_t kGrowers = 10;

  struct Slice {
    HostMapping memory;
    RangeSet free;  // one set for each slice: ranges of adjacent slices never merge
  };
  [[nodiscard]] HostMapping make_slice(std::size_t bytes) const {
    check_available(bytes);  // it may have shrunk since the growth began
    void* const memory = sys::map(bytes);
    madvise(memory, bytes, MADV_DONTFORK);  // pinned pages must not become copy-on-write
    if (bytes >= kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);
    prefer_node(memory, bytes, numa_node_);
    auto* const data = static_cast<volatile char*>(memory);
    for (std::size_t at = 0; at < bytes; at += page_bytes()) data[at] = 0;
    return {memory, bytes};
  }
  void grow_to(std::size_t capacity) REQUIRES(mutex_) {
    target_ = std::max(target_, capacity);
    if (growers_ > 0) return;  // running threads see the new target
    growth_failure_ = nullptr;
    if (target_ <= capacity_) return;
    for (auto& thread : threads_) thread.join();
    threads_.clear();
    const std::size_t there = capacity_ + under_way_;
    try {
      if (target_ > there) check_available(target_ - there);
    } catch (const Error&) {
      target_ = there;
      growth_failure_ = std::current_exception();
      return;
    }
    const std::size_t missing = target_ - capacity_;
    const std::size_t slices = (missing + kBlockBytes - 1) / kBlockBytes;
    const std::size_t wanted = std::min(sys::up_to_cores(kGrowers), slices);
    for (; growers_ < wanted; ++growers_) {
      auto thread = sys::start_thread([this] { grow(); });
      if (!thread) break;
      threads_.push_back(std::move(*thread));
    }
    if (growers_ == 0) {
      target_ = capacity_;
      growth_failure_ = std::make_exception_ptr(
          Error::from_driver(ErrorKind::out_of_host_memory, "thread", "EAGAIN",
                             "no thread can be started to pin memory")
              .with_bytes(missing)
              .with_advice("raise the limit of processes and threads (ulimit -u, pids.max), and repeat"));
    }
  }
  // Makes slices until the target is reached or one fails; registers them, too, while no operation waits for memory.
  void grow() {
    const Lock lock(mutex_);
    while (!stop_ && !growth_failure_) {
      if (urgent_ == 0 && register_one()) continue;
      if (target_ <= capacity_ + under_way_) {
        if (urgent_ > 0 || touched_.empty()) break;
        changed_.wait(mutex_);  // another thread is registering, and touched slices are left
        continue;
      }
      const std::size_t left = target_ - capacity_ - under_way_;
      const std::size_t bytes = to_pages(std::min(left, std::clamp(left / kGrowers, kBlockBytes, kSliceBytes)));
      under_way_ += bytes;
      mutex_.unlock();
      std::optional<HostMapping> slice;
      const std::exception_ptr failure = sys::failure_of([&] { slice.emplace(make_slice(bytes)); });
      mutex_.lock();
      if (slice) {
        touched_.push_back(std::move(*slice));
      } else {
        under_way_ -= bytes;
        growth_failure_ = failure;
      }
      changed_.notify_all();
    }
    if (--growers_ == 0 && growth_failure_) target_ = capacity_ + under_way_;  // no thread makes the rest
    changed_.notify_all();
  }
  // Registers one touched slice, without the lock. Returns false if there is none, or another thread is registering.
  bool register_one() REQUIRES(mutex_) {
    if (registering_ || touched_.empty()) return false;
    HostMapping slice = std::move(touched_.front());
    touched_.pop_front();
    registering_ = true;
    mutex_.unlock();
    const std::exception_ptr failure = sys::failure_of([&] {
      try {
        slice.pin(driver_);
      } catch (Error& error) {
        throw error.with_bytes(slice.bytes());
      }
    });
    mutex_.lock();
    registering_ = false;
    under_way_ -= slice.bytes();
    if (failure) {
      growth_failure_ = failure;
    } else {
      add_slice(std::move(slice));
    }
    changed_.notify_all();
    return true;
  }
  void add_slice(HostMapping slice) REQUIRES(mutex_) {
    const std::uintptr_t address = slice.address();
    capacity_ += slice.bytes();
    Slice& added = slices_.emplace(address, Slice{std::move(slice), {}}).first->second;
    added.free.add(address, added.memory.bytes());
  }
  // Throws out_of_host_memory if `bytes` more than those in use exceed the limit.
  void check_limit(std::size_t bytes, std::size_t used) const {
    const std::size_t free = limit_ > used ? limit_ - used : 0;
    if (bytes <= free) return;
    throw short_of_memory("too little host memory is left under the limit for backups", bytes, free);
  }
  void wait_for_capacity(std::size_t bytes, Use use) REQUIRES(mutex_) {
    bool tried = false;
    for (;;) {
      if (use != Use::must_pass) check_limit(bytes, use == Use::backup ? used_ - passing_ : used_);
      if (capacity_ - used_ >= bytes) return;
      if (register_one()) continue;
      if (!growth_failure_ && is_growing()) {
        changed_.wait(mutex_);
        continue;
      }
      if (growth_failure_ && tried) std::rethrow_exception(std::exchange(growth_failure_, nullptr));
      // The cause that stopped an earlier growth may be gone: try once.
      while (is_growing()) changed_.wait(mutex_);
      grow_to(used_ + bytes);
      tried = true;
    }
  }
  // In one piece if a slice has room for it, otherwise in several. Requires `bytes` of unused capacity.
  [[nodiscard]] std::vector<HostRange> carve(std::size_t bytes) REQUIRES(mutex_) {
    for (auto& [address, slice] : slices_) {
      if (const auto begin = slice.free.take(bytes)) return {{*begin, bytes}};
    }
    std::vector<HostRange> ranges;
    for (auto& [address, slice] : slices_) {
      while (bytes > 0) {
        const auto range = slice.free.take_from_largest(bytes);
        if (!range) break;
        ranges.push_back({range->begin, range->bytes});
        bytes -= range->bytes;
      }
    }
    return ranges;
  }
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
