#include "backup/shared_mapping.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>

#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/log.hpp"
#include "support/system.hpp"

namespace memsaver {

namespace {

constexpr std::size_t kTouchers = 8;  // 8 GiB in 1.6 s, of pages of 4 KiB

}  // namespace

SharedMapping::~SharedMapping() {
  for (const auto& [index, slab] : slabs_) still_pinned_.push_back(slab);
  for (const auto& slab : still_pinned_) {
    try {
      unpin(slab);
    } catch (const std::exception&) {
      // At process exit the context may be gone; the kernel unpins the memory.
    }
    munmap(reinterpret_cast<void*>(slab.address), slab.bytes);
  }
}

void SharedMapping::unpin(const Mapped& slab) {
  if (slab.pinned) driver_.unregister_host(reinterpret_cast<void*>(slab.address));
}

void SharedMapping::let_go(const std::map<std::uint32_t, Mapped>& slabs) {
  std::vector<Mapped> going;
  {
    const Lock lock(mutex_);
    going.swap(still_pinned_);
  }
  for (const auto& [index, slab] : slabs) going.push_back(slab);
  for (const auto& slab : going) {
    try {
      unpin(slab);
      munmap(reinterpret_cast<void*>(slab.address), slab.bytes);
    } catch (const Error& error) {
      warn(std::string("memory of the shared store stays pinned: ") + error.what());
      const Lock lock(mutex_);
      still_pinned_.push_back(slab);
    }
  }
}

void SharedMapping::map(std::uint32_t slab, std::size_t bytes) {
  const Lock lock(mutex_);
  if (slabs_.count(slab) != 0) return;
  const std::size_t offset = SharedLayout::slabs_at() + slab * kSlabBytes;
  void* const memory = sys::map_file(file_, offset, bytes);
  madvise(memory, bytes, MADV_DONTFORK);
  madvise(memory, bytes, MADV_HUGEPAGE);  // if the machine has them for shared memory (shmem_enabled)
  slabs_.emplace(slab, Mapped{reinterpret_cast<std::uintptr_t>(memory), bytes});
}

void SharedMapping::touch(std::uint32_t slab, int numa_node) {
  HostRange all{};
  {
    const Lock lock(mutex_);
    all = {slabs_.at(slab).address, slabs_.at(slab).bytes};
  }
  prefer_node(reinterpret_cast<void*>(all.address), all.bytes, numa_node);
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t count = std::min({kTouchers, cores, all.bytes / kGrain});
  const std::size_t part = to_pages(all.bytes / count + 1);
  std::atomic<int> failure{0};
  sys::run_in_threads(count, [&](std::size_t i) {
    const std::size_t begin = std::min(all.bytes, i * part);
    const std::size_t end = std::min(all.bytes, begin + part);
    const int code = sys::make_pages(reinterpret_cast<void*>(all.address + begin), end - begin);
    if (code != 0) failure = code;
  });
  if (failure == 0) return;
  throw Error::from_driver(ErrorKind::out_of_host_memory, "madvise", strerrorname_np(failure), std::strerror(failure))
      .with_bytes(all.bytes)
      .with_advice("free host memory, or raise the limit on what the machine commits (vm.overcommit_ratio)");
}

void SharedMapping::pin(std::uint32_t slab) {
  const Lock one_at_a_time(pin_mutex);
  HostRange all{};
  {
    const Lock lock(mutex_);
    const auto found = slabs_.find(slab);
    if (found == slabs_.end() || found->second.pinned) return;
    all = {found->second.address, found->second.bytes};
  }
  driver_.register_host(reinterpret_cast<void*>(all.address), all.bytes);
  const Lock lock(mutex_);
  slabs_.at(slab).pinned = true;
}

void SharedMapping::pin_all() {
  std::vector<HostRange> all;
  {
    const Lock lock(mutex_);
    for (const auto& [index, slab] : slabs_) all.push_back({slab.address, slab.bytes});
  }
  pin(all);
}

void SharedMapping::pin(const std::vector<HostRange>& ranges) {
  std::vector<std::uint32_t> wanted;
  {
    const Lock lock(mutex_);
    for (const auto& range : ranges) {
      for (const auto& [index, slab] : slabs_) {
        const bool inside = range.address >= slab.address && range.address < slab.address + slab.bytes;
        if (inside && !slab.pinned) wanted.push_back(index);
      }
    }
  }
  for (const std::uint32_t slab : wanted) pin(slab);
}

std::map<std::uint32_t, SharedMapping::Mapped> SharedMapping::forget(const std::vector<std::uint32_t>& slabs) {
  std::map<std::uint32_t, Mapped> forgotten;
  const Lock lock(mutex_);
  for (const std::uint32_t slab : slabs) {
    const auto found = slabs_.find(slab);
    if (found == slabs_.end()) continue;
    forgotten.insert(*found);
    slabs_.erase(found);
  }
  return forgotten;
}

std::vector<HostRange> SharedMapping::ranges_of(const std::vector<SharedIndex::Piece>& pieces,
                                                std::size_t bytes) const {
  std::vector<HostRange> ranges;
  const Lock lock(mutex_);
  for (const auto& piece : pieces) {
    const std::size_t length = std::min(bytes, piece.grains * kGrain);
    ranges.push_back({slabs_.at(piece.slab).address + piece.first * kGrain, length});
    bytes -= length;
  }
  return ranges;
}

std::size_t SharedMapping::pinned_bytes() const {
  const Lock lock(mutex_);
  std::size_t sum = 0;
  for (const auto& [index, slab] : slabs_) sum += slab.pinned ? slab.bytes : 0;
  return sum;
}

}  // namespace memsaver
