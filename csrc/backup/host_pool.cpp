#include "backup/host_pool.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "support/host_memory.hpp"
#include "support/log.hpp"
#include "support/sizes.hpp"
#include "support/system.hpp"

namespace memsaver {

namespace {

// Measured on an H200 with 16 cores, first release of 31 GiB: 10 threads and 128 MiB slices ran at 40 to 42 GB/s, 8 at
// 41, 12 threads and 64 MiB slices at 36, 15 threads at 26 (the taker, which registers and copies, lacked a core).
constexpr std::size_t kSliceBytes = 128 * kSizeUnit;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kGrowers = 10;

}  // namespace

Error short_of_memory(const std::string& what, std::size_t needed, std::size_t free, const std::string& whose) {
  return Error(ErrorKind::out_of_host_memory, what)
      .with_memory(needed, free)
      .with_advice("raise MEMSAVER_HOST_BACKUP_LIMIT" + whose +
                   ", free host memory, or choose another restore policy for the tag");
}

void check_available(std::size_t bytes, const std::string& whose) {
  const std::size_t available = available_memory_bytes(bytes);
  if (bytes <= available) return;
  throw short_of_memory("this machine has too little memory for the backup", bytes, available, whose);
}

HostPool::HostPool(Driver& driver, std::size_t limit_bytes, int numa_node)
    : driver_(driver), limit_(limit_bytes), numa_node_(numa_node) {}

HostPool::~HostPool() {
  {
    const Lock lock(mutex_);
    stop_ = true;
  }
  for (auto& thread : threads_) thread.join();
}

void HostPool::check(std::size_t bytes) {
  std::size_t fresh = 0;
  {
    const Lock lock(mutex_);
    const std::size_t free = limit_ > used_ ? limit_ - used_ : 0;
    if (bytes > free) throw short_of_memory("the host memory for backups is bounded", bytes, free);
    const std::size_t pinned = std::max(capacity_, target_);
    if (used_ + bytes > pinned) fresh = used_ + bytes - pinned;
  }
  if (fresh > 0) check_available(fresh);
}

void HostPool::start_growth(std::size_t bytes) {
  const Lock lock(mutex_);
  grow_to(std::min(limit_, used_ + bytes));
}

void HostPool::grow_to(std::size_t capacity) {
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
  const std::size_t slices = (missing + kSliceBytes - 1) / kSliceBytes;
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t wanted = std::min({kGrowers, cores, slices});
  for (; growers_ < wanted; ++growers_) {
    auto thread = sys::start_thread([this] { grow(); });
    if (!thread) break;
    threads_.push_back(std::move(*thread));
  }
  if (growers_ == 0) {
    target_ = capacity_;
    growth_failure_ = std::make_exception_ptr(
        Error::from_driver(ErrorKind::out_of_host_memory, "thread", "EAGAIN", "no thread can be started to pin memory")
            .with_bytes(missing)
            .with_advice("raise the limit of processes and threads (ulimit -u, pids.max), and repeat"));
  }
}

void HostPool::wait_for_growth() {
  const Lock lock(mutex_);
  while (is_growing()) changed_.wait(mutex_);
  if (growth_failure_) std::rethrow_exception(growth_failure_);
}

void HostPool::add_urgent(int change) {
  const Lock lock(mutex_);
  urgent_ += change;
  changed_.notify_all();
}

// The body of a maker thread: makes slices until the target is reached or one fails. While no operation waits for
// memory it also registers them.
void HostPool::grow() {
  const Lock lock(mutex_);
  while (!stop_ && !growth_failure_) {
    if (urgent_ == 0 && register_one()) continue;
    if (target_ <= capacity_ + under_way_) {
      if (urgent_ > 0 || touched_.empty()) break;
      changed_.wait(mutex_);  // another thread is registering, and touched slices are left
      continue;
    }
    const std::size_t bytes = std::min(kSliceBytes, to_pages(target_ - capacity_ - under_way_));
    under_way_ += bytes;
    mutex_.unlock();
    std::exception_ptr failure;
    std::optional<HostMapping> slice;
    try {
      slice.emplace(make_slice(bytes));
    } catch (...) {
      failure = std::current_exception();
    }
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

// Registers one touched slice, without the lock meanwhile. Returns false if there is none, or another thread is
// registering.
bool HostPool::register_one() {
  if (registering_ || touched_.empty()) return false;
  HostMapping slice = std::move(touched_.front());
  touched_.pop_front();
  registering_ = true;
  mutex_.unlock();
  std::exception_ptr failure;
  try {
    slice.pin(driver_);
  } catch (Error& error) {
    error.with_bytes(slice.bytes());
    failure = std::current_exception();
  }
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

void HostPool::add_slice(HostMapping slice) {
  const std::uintptr_t address = slice.address();
  capacity_ += slice.bytes();
  Slice& added = slices_.emplace(address, Slice{std::move(slice), {}}).first->second;
  added.free.add(address, added.memory.bytes());
}

HostMapping HostPool::make_slice(std::size_t bytes) const {
  check_available(bytes);  // it may have shrunk since the growth began
  void* const memory = sys::map_memory(bytes, 0);
  madvise(memory, bytes, MADV_DONTFORK);  // pinned pages must not become copy-on-write
  if (bytes >= kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);
  prefer_node(memory, bytes, numa_node_);
  auto* const data = static_cast<volatile char*>(memory);
  for (std::size_t at = 0; at < bytes; at += page_bytes()) data[at] = 0;
  return {memory, bytes};
}

std::vector<HostRange> HostPool::take(std::size_t bytes, Use use) {
  const std::size_t rest = to_pages(bytes) - bytes;
  bytes += rest;
  const Lock lock(mutex_);
  wait_for_capacity(bytes, use);
  const std::vector<HostRange> ranges = carve(bytes);
  used_ += bytes;
  if (use != Use::backup) passing_ += bytes;
  if (rest > 0) {
    const HostRange& last = ranges.back();
    std::memset(reinterpret_cast<char*>(last.address + last.bytes - rest), 0, rest);
  }
  return ranges;
}

void HostPool::wait_for_capacity(std::size_t bytes, Use use) {
  bool tried = false;
  for (;;) {
    const std::size_t counted = use == Use::backup ? used_ - passing_ : used_;
    const std::size_t free = limit_ > counted ? limit_ - counted : 0;
    if (bytes > free && use != Use::must_pass) {
      throw short_of_memory("the host memory for backups is bounded", bytes, free);
    }
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
std::vector<HostRange> HostPool::carve(std::size_t bytes) {
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

void HostPool::give(const std::vector<HostRange>& ranges, Use use) {
  const Lock lock(mutex_);
  for (const auto& range : ranges) {
    std::prev(slices_.upper_bound(range.address))->second.free.add(range.address, range.bytes);
    used_ -= range.bytes;
    if (use != Use::backup) passing_ -= range.bytes;
  }
}

void HostPool::trim() {
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

HostPoolStatus HostPool::status() const {
  const Lock lock(mutex_);
  return {used_, capacity_, std::max(target_, capacity_), limit_};
}

}  // namespace memsaver
