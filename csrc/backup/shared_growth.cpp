// The memory of a SharedStore: made, prepared and given back.

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "backup/shared_store.hpp"
#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/log.hpp"
#include "support/scope_exit.hpp"
#include "support/system.hpp"

namespace memsaver {

namespace {

constexpr std::chrono::seconds kOthersPatience{5};  // for a slab that another process makes

Error no_memory(const std::string& why, std::size_t needed, std::size_t free) {
  return Error(ErrorKind::out_of_host_memory, why)
      .with_memory(needed, free)
      .with_advice(
          "raise MEMSAVER_HOST_BACKUP_LIMIT of all processes of the store, which its first one sets, free host "
          "memory, or choose another restore policy for the tag");
}

}  // namespace

std::vector<HostRange> SharedStore::take(std::uint32_t entry, std::size_t bytes, std::size_t expected, int numa_node) {
  for (bool fragmented = false;; fragmented = true) {
    if (!lock_index()) return {};
    const bool taken = index_->take(entry, bytes);
    const std::vector<SharedIndex::Piece> pieces = index_->pieces_of(entry);
    const std::size_t free = index_->slab_bytes() - index_->used_bytes();
    const std::size_t missing = fragmented || bytes <= free ? bytes : bytes - free;
    // What this process expects, others may be writing.
    const std::size_t share = expected / std::max<std::size_t>(1, index_->members());
    const auto slab = taken ? std::nullopt : index_->begin_slab(missing, std::max(bytes, share));
    index_->mutex.unlock();
    if (taken) {
      map(pieces);
      std::vector<HostRange> ranges = mapping_->ranges_of(pieces, to_pages(bytes));
      mapping_->pin(ranges);
      const HostRange& last = ranges.back();
      const std::size_t rest = to_pages(bytes) - bytes;
      std::memset(reinterpret_cast<char*>(last.address + last.bytes - rest), 0, rest);
      return ranges;
    }
    if (!slab) {
      throw no_memory("the host memory of the shared store is bounded", bytes,
                      index_->limit_bytes() - std::min(index_->limit_bytes(), index_->used_bytes()));
    }
    make_slab(*slab, numa_node);
  }
}

// Completes a slab that begin_slab() gave this process. When it throws, the slab is complete, too, or given up: nobody
// uses one without pages, because a write to it may find no memory.
void SharedStore::make_slab(std::uint32_t slab, int numa_node) {
  const std::size_t bytes = index_->bytes_of(slab);
  bool touched = false;
  const ScopeExit at_end([&] {
    if (!touched) give_up_slab(slab);
    owe({touched ? Owed::made : Owed::gone, slab});
    settle();
  });
  const std::size_t available = available_memory_bytes(bytes);
  if (bytes > available) throw no_memory("this machine has too little memory for the backup", bytes, available);
  mapping_->map(slab, bytes);
  mapping_->touch(slab, numa_node);
  touched = true;
  mapping_->pin(slab);
}

void SharedStore::give_up_slab(std::uint32_t slab) {
  std::map<std::uint32_t, SharedMapping::Mapped> mapped;
  {
    const Lock not_pinned(mapping_->pin_mutex);
    mapped = mapping_->forget({slab});
  }
  mapping_->let_go(mapped);
  punch(slab);
}

void SharedStore::prepare_beyond(std::size_t bytes) {
  target_ = bytes + status().held_bytes;
  work_later();
}

void SharedStore::tidy() {
  target_ = 0;
  tidy_wanted_ = true;
  work_later();
}

void SharedStore::work_later() {
  const Lock lock(work_mutex_);
  again_ = true;
  if (working_) return;
  if (worker_.joinable()) worker_.join();
  work_failure_ = nullptr;
  if (auto thread = sys::start_thread([this] { work(); })) {
    worker_ = std::move(*thread);
    working_ = true;
  } else {
    again_ = false;
    warn("no thread can be started to pin memory of the shared store; the next operation does it");
  }
}

void SharedStore::work() {
  const Lock lock(work_mutex_);
  while (std::exchange(again_, false) && !ending_) {
    work_mutex_.unlock();
    std::exception_ptr failure;
    try {
      prepare_now();
      // Content that changes on several processes, one after the other, uses some memory twice.
      const std::size_t used = index_->used_bytes();
      if (tidy_wanted_.exchange(false) && index_->slab_bytes() > used + used / 32) trim();
    } catch (...) {
      failure = std::current_exception();
    }
    work_mutex_.lock();
    work_failure_ = failure;
  }
  working_ = false;
  worked_.notify_all();
}

void SharedStore::wait_until_prepared() {
  const Lock lock(work_mutex_);
  while (working_) worked_.wait(work_mutex_);
  if (work_failure_) std::rethrow_exception(work_failure_);
}

// Processes that prepare at the same time make slabs side by side, together no more than the largest one wants.
void SharedStore::prepare_now() {
  auto patience = std::chrono::steady_clock::now() + kOthersPatience;
  while (!ending_) {
    mapping_->pin_all();
    if (mapping_->pinned_bytes() >= target_) return;
    const std::uint32_t seen = index_->changes();
    if (!map_another()) {
      if (!lock_index()) return;
      const std::size_t missing = target_ - std::min<std::size_t>(target_, index_->slab_bytes());
      const auto slab = missing > 0 ? index_->begin_slab(kGrain, missing) : std::nullopt;
      index_->mutex.unlock();
      if (slab) {
        make_slab(*slab, -1);
      } else if (missing > 0 || std::chrono::steady_clock::now() > patience) {
        return;  // at the limit; or another process does not complete its slab
      } else {
        wait_for_change(seen);
        continue;
      }
    }
    patience = std::chrono::steady_clock::now() + kOthersPatience;
  }
}

// Maps one more slab that other processes made, if there is any.
bool SharedStore::map_another() {
  const Lock lock(map_mutex_);
  if (!lock_index()) return false;
  const std::vector<std::uint32_t> others = index_->unmapped_slabs();
  if (!others.empty()) index_->set_mapped(others.front());
  index_->mutex.unlock();
  if (others.empty()) return false;
  mapping_->map(others.front(), index_->bytes_of(others.front()));
  return true;
}

void SharedStore::trim() {
  settle();
  std::map<std::uint32_t, SharedMapping::Mapped> unneeded;
  {
    const Lock no_other(map_mutex_);
    const Lock not_pinned(mapping_->pin_mutex);
    if (!lock_index()) return;
    std::vector<std::uint32_t> entries;
    {
      const Lock lock(mutex_);
      for (const auto& [entry, uses] : uses_) entries.push_back(entry);
    }
    unneeded = mapping_->forget(index_->unmap_unneeded(entries));
    index_->mutex.unlock();
  }
  mapping_->let_go(unneeded);
  give_back_unused([] {});
}

void SharedStore::punch(std::uint32_t slab) {
  const auto offset = static_cast<off_t>(SharedLayout::slabs_at() + slab * kSlabBytes);
  (void)sys::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, kSlabBytes);
}

void SharedStore::give_back_unused(const std::function<void()>& between) {
  if (!lock_index()) return;
  index_->bury();
  const std::vector<std::uint32_t> slabs = index_->unused_slabs();
  index_->mutex.unlock();
  for (const std::uint32_t slab : slabs) {
    between();
    punch(slab);
  }
  if (slabs.empty() || !lock_index()) return;
  for (const std::uint32_t slab : slabs) index_->gone(slab);
  index_->mutex.unlock();
}

}  // namespace memsaver
