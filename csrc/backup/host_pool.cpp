#include "backup/host_pool.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <future>
#include <utility>

#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/log.hpp"

namespace memsaver {

namespace {

// Small enough for the first copies to start soon and for the last slice to waste nothing, large enough that the cost
// of a registration (about 0.1 ms beside 17 ms/GiB) does not show.
constexpr std::size_t kSliceBytes = std::size_t{256} << 20;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr unsigned kTouchThreads = 16;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

Error short_of_memory(const std::string& what, std::size_t needed, std::size_t free) {
  return Error(ErrorKind::out_of_host_memory, what)
      .with_memory(needed, free)
      .with_advice("raise MEMSAVER_HOST_BACKUP_LIMIT, free host memory, or choose another restore policy for the tag");
}

}  // namespace

HostPool::HostPool(Driver& driver, std::size_t limit_bytes, int numa_node)
    : driver_(driver), limit_(limit_bytes), numa_node_(numa_node) {}

HostPool::~HostPool() {
  stop_growth();
  for (const auto& [address, slice] : slices_) {
    try {
      driver_.unregister_host(reinterpret_cast<void*>(address));
    } catch (const std::exception&) {
      // At process exit the device may be gone before the pool; the kernel unpins what it held.
    }
    munmap(reinterpret_cast<void*>(address), slice.bytes);
  }
}

void HostPool::check(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t free = limit_ > used_ ? limit_ - used_ : 0;
  if (bytes > free) throw short_of_memory("the host memory for backups is bounded", bytes, free);
  const std::size_t pinned = std::max(capacity_, target_);
  const std::size_t fresh = used_ + bytes > pinned ? used_ + bytes - pinned : 0;
  if (fresh == 0) return;
  const std::size_t available = available_memory_bytes();
  if (fresh > available) throw short_of_memory("this machine has too little memory for the backup", fresh, available);
}

void HostPool::start_growth(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::size_t wanted = std::min(limit_, used_ + bytes);
  if (wanted <= std::max(capacity_, target_)) return;
  target_ = wanted;
  growth_failure_ = nullptr;
  if (growing_) return;
  if (grower_.joinable()) grower_.join();
  growing_ = true;
  grower_ = std::thread([this] { grow(); });
}

void HostPool::wait_for_growth() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return !growing_; });
  if (growth_failure_) std::rethrow_exception(growth_failure_);
}

void HostPool::stop_growth() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  if (grower_.joinable()) grower_.join();
}

// Touches slice i + 1 while slice i is registered: either alone runs at about 50 GB/s on 16 cores.
void HostPool::grow() {
  std::future<Mapping> next;
  std::size_t under_way = 0;
  const auto begin_next = [&]() -> bool {
    std::size_t missing;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      missing = target_ > capacity_ + under_way ? target_ - capacity_ - under_way : 0;
      if (stop_ || missing == 0) return false;
    }
    const std::size_t bytes = std::min(kSliceBytes, round_up(missing, page_bytes()));
    next = std::async(std::launch::async, [this, bytes] { return map_touched(bytes); });
    under_way += bytes;
    return true;
  };
  std::exception_ptr failure;
  try {
    begin_next();
    for (;;) {
      while (next.valid()) {
        const Mapping mapping = next.get();
        begin_next();
        try {
          driver_.register_host(reinterpret_cast<void*>(mapping.address), mapping.bytes);
        } catch (...) {
          munmap(reinterpret_cast<void*>(mapping.address), mapping.bytes);
          throw;
        }
        under_way -= mapping.bytes;
        const std::lock_guard<std::mutex> lock(mutex_);
        slices_.emplace(mapping.address, Slice{mapping.bytes});
        free_[mapping.address].add(mapping.address, mapping.bytes);
        capacity_ += mapping.bytes;
        changed_.notify_all();
      }
      // The target may have moved since the last slice was begun.
      if (begin_next()) continue;
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stop_ || target_ <= capacity_) {
        growing_ = false;
        changed_.notify_all();
        return;
      }
    }
  } catch (...) {
    failure = std::current_exception();
  }
  if (next.valid()) {
    try {
      const Mapping mapping = next.get();
      munmap(reinterpret_cast<void*>(mapping.address), mapping.bytes);
    } catch (const std::exception&) {
      // The first failure is the one to report.
    }
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  growing_ = false;
  target_ = capacity_;
  growth_failure_ = failure;
  changed_.notify_all();
}

HostPool::Mapping HostPool::map_touched(std::size_t bytes) const {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error::from_driver(ErrorKind::out_of_host_memory, "mmap", strerrorname_np(errno), std::strerror(errno))
        .with_bytes(bytes);
  }
  madvise(memory, bytes, MADV_DONTFORK);  // pinned pages must not become copy-on-write
  if (bytes >= kHugePage) madvise(memory, bytes, MADV_HUGEPAGE);
#ifdef SYS_mbind
  if (numa_node_ >= 0 && numa_node_ < 64) {
    constexpr int kPreferred = 1;  // MPOL_PREFERRED: another node rather than a failure
    const unsigned long nodes = 1ul << numa_node_;
    syscall(SYS_mbind, memory, bytes, kPreferred, &nodes, 64, 0);
  }
#endif
  const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t parts = std::min<std::size_t>({kTouchThreads, cores, (bytes + kHugePage - 1) / kHugePage});
  const std::size_t part = round_up((bytes + parts - 1) / parts, kHugePage);
  const auto touch = [memory, bytes, part](std::size_t index) {
    auto* const data = static_cast<volatile char*>(memory);
    const std::size_t end = std::min(bytes, (index + 1) * part);
    for (std::size_t at = index * part; at < end; at += page_bytes()) data[at] = 0;
  };
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < parts; ++i) threads.emplace_back(touch, i);
  touch(0);
  for (auto& thread : threads) thread.join();
  return {reinterpret_cast<std::uintptr_t>(memory), bytes};
}

std::vector<HostRange> HostPool::take(std::size_t bytes) {
  bytes = round_up(bytes, page_bytes());
  std::unique_lock<std::mutex> lock(mutex_);
  while (capacity_ - used_ < bytes) {
    if (growing_) {
      changed_.wait(lock);
      continue;
    }
    if (growth_failure_) std::rethrow_exception(std::exchange(growth_failure_, nullptr));
    if (used_ + bytes > limit_) {
      throw short_of_memory("the host memory for backups is bounded", bytes, limit_ - std::min(limit_, used_));
    }
    lock.unlock();
    start_growth(bytes);
    lock.lock();
  }
  // In one piece where a slice has it (the fullest such slice, which keeps large ranges whole), else in several.
  std::vector<HostRange> ranges;
  std::size_t missing = bytes;
  for (auto& [slice, free] : free_) {
    if (const auto begin = free.take(bytes)) {
      ranges.push_back({*begin, bytes});
      slices_[slice].used_bytes += bytes;
      missing = 0;
      break;
    }
  }
  for (auto at = free_.begin(); missing > 0 && at != free_.end(); ++at) {
    while (missing > 0) {
      const auto range = at->second.take_from_largest(missing);
      if (!range) break;
      ranges.push_back({range->begin, range->bytes});
      slices_[at->first].used_bytes += range->bytes;
      missing -= range->bytes;
    }
  }
  used_ += bytes;
  return ranges;
}

void HostPool::give(const std::vector<HostRange>& ranges) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& range : ranges) {
    const auto slice = std::prev(slices_.upper_bound(range.address));
    slice->second.used_bytes -= range.bytes;
    free_[slice->first].add(range.address, range.bytes);
    used_ -= range.bytes;
  }
}

std::size_t HostPool::trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (growing_) return 0;
  std::size_t freed = 0;
  for (auto at = slices_.begin(); at != slices_.end();) {
    if (at->second.used_bytes != 0) {
      ++at;
      continue;
    }
    try {
      driver_.unregister_host(reinterpret_cast<void*>(at->first));
    } catch (const std::exception& error) {
      warn(std::string("a slice of backup memory stays pinned: ") + error.what());
      ++at;
      continue;
    }
    munmap(reinterpret_cast<void*>(at->first), at->second.bytes);
    freed += at->second.bytes;
    free_.erase(at->first);
    at = slices_.erase(at);
  }
  capacity_ -= freed;
  target_ = capacity_;
  return freed;
}

HostPoolStatus HostPool::status() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {used_, capacity_, std::max(target_, capacity_), limit_};
}

}  // namespace memsaver
