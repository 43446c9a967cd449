#include "vmm/saver.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <limits>
#include <utility>

#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/log.hpp"
#include "support/sizes.hpp"
#include "support/system.hpp"
#include "support/transaction.hpp"

namespace memsaver {

namespace {

// A dead range smaller than this is copied along with its neighbours: copying 64 KiB takes about a microsecond, a
// further copy several.
constexpr std::size_t kSmallestGap = kSizeUnit / 16;
constexpr std::size_t kFirstMemory = 64 * kSizeUnit;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

void make_blocks(Allocation& allocation) {
  if (!allocation.blocks.empty()) return;
  for (std::size_t at = 0; at < allocation.bytes; at += kBlockBytes) {
    Block block;
    block.offset = at;
    block.bytes = std::min(kBlockBytes, allocation.bytes - at);
    allocation.blocks.push_back(std::move(block));
  }
}

// The part of a block that holds content: all but `dead`, which is in address order.
std::vector<Extent> live_extents(const Allocation& allocation, const Block& block,
                                 const std::vector<RangeSet::Range>& dead) {
  std::vector<Extent> extents;
  const Address begin = allocation.address + block.offset;
  const Address end = begin + block.bytes;
  const auto add = [&](Address from, Address to) {
    if (from < to) extents.push_back({from - allocation.address, to - from});
  };
  auto range = std::partition_point(dead.begin(), dead.end(),
                                    [&](const auto& each) { return each.begin + each.bytes <= begin; });
  Address at = begin;
  for (; range != dead.end() && range->begin < end; ++range) {
    const Address from = std::max(begin, range->begin);
    const Address to = std::min(end, range->begin + range->bytes);
    if (to - from < kSmallestGap) continue;
    add(at, from);
    at = to;
  }
  add(at, end);
  return extents;
}

std::size_t sum_of(const std::vector<Extent>& extents) {
  std::size_t sum = 0;
  for (const auto& extent : extents) sum += extent.bytes;
  return sum;
}

// Bytes that a release of everything in the arena would take from the host pool.
std::size_t unpinned_bytes(const Arena& arena) {
  std::size_t sum = 0;
  for (const auto& [address, allocation] : arena.allocations()) {
    if (allocation.blocks.empty()) sum += allocation.bytes;
    for (const auto& block : allocation.blocks) {
      if (block.host.empty() && block.kept != Kept::zero) sum += block.bytes;
    }
  }
  return sum;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

// What an operation does on one device.
struct Saver::DeviceWork {
  struct Owned {
    Arena* arena;
    Chunk chunk;
    Restore restore = Restore::discard;  // what its live ranges are owed: releasing, from then on; resuming, now
  };
  int device = -1;
  std::vector<ContentBlock> blocks;               // content to keep or restore, in address order
  std::vector<Owned> kept;                        // chunks under content, in address order
  std::vector<Owned> others;                      // chunks whose content is not kept
  std::map<std::string, std::size_t> done_bytes;  // given back or mapped, by tag
  std::size_t freed_bytes = 0;
  double first_memory_seconds = 0;
  std::vector<Owned> acquired;
  Transaction transaction;
  PipelineSeconds seconds;

  // What an error names where no single tag is in work.
  [[nodiscard]] std::string tags() const {
    std::set<std::string> names;
    for (const auto* list : {&kept, &others}) {
      for (const auto& owned : *list) names.insert(owned.arena->key().tag);
    }
    std::string text;
    for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
  }
  [[nodiscard]] std::size_t bytes() const {
    std::size_t sum = 0;
    for (const auto* list : {&kept, &others}) {
      for (const auto& owned : *list) sum += owned.chunk.bytes;
    }
    return sum;
  }
};

Saver::Saver(std::unique_ptr<Driver> driver, Settings settings)
    : driver_(std::move(driver)),
      settings_([&] {
        if (settings.host_backup_limit == 0) settings.host_backup_limit = available_memory_bytes() / 5 * 4;
        return settings;
      }()),
      files_(settings_.file_folder) {}

Saver::~Saver() {
  if (getpid() != process_) {
    // A forked child shares the device memory of its parent and has none of its threads: it must end nothing.
    for (auto& [device, pipeline] : pipelines_) (void)pipeline.release();
    for (auto& [node, pool] : pools_) (void)pool.release();
    (void)driver_.release();
    if (retainer_.joinable()) retainer_.detach();
    return;
  }
  if (retainer_.joinable()) retainer_.join();
  pipelines_.clear();  // they use the pools and the files
  for (auto& [key, arena] : arenas_) {
    for (const auto& [address, chunk] : arena->chunks()) {
      try {
        driver_->unmap(key.device, chunk.address, chunk.bytes);
        driver_->release(key.device, chunk.handle, chunk.bytes);
      } catch (const std::exception& error) {
        warn(std::string("while giving everything back: ") + error.what());
      }
    }
  }
  try {
    release_orphans();
    for (auto& [key, arena] : arenas_) {
      for (const auto& [address, bytes] : arena->spans()) {
        driver_->unreserve(key.device, address, bytes + guard_bytes(key.device));
      }
    }
  } catch (const std::exception& error) {
    warn(std::string("while giving addresses back: ") + error.what());
  }
}

void Saver::check_process() const {
  if (getpid() == process_) return;
  throw Error(ErrorKind::forked, "memsaver was set up in process " + std::to_string(process_) +
                                     " and cannot be used in its forked child " + std::to_string(getpid()) +
                                     "; start workers with the 'spawn' method");
}

void Saver::check_failed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) throw Error(ErrorKind::context_lost, failure_).with_advice("restart the process");
}

void Saver::note_failure(const Error& error) {
  if (error.kind != ErrorKind::context_lost) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.empty()) failure_ = error.what();
}

template <typename Function>
auto Saver::guarded(Function function) {
  check_process();
  check_failed();
  try {
    return function();
  } catch (const Error& error) {
    note_failure(error);
    throw;
  }
}

bool Saver::selected(const Tags& tags, const std::string& tag) const {
  return tags.empty() || std::find(tags.begin(), tags.end(), tag) != tags.end();
}

// Only with mutex_ held.
Arena& Saver::arena_for(const Arena::Key& key) {
  if (infos_.find(key.device) == infos_.end()) infos_.emplace(key.device, driver_->device_info(key.device));
  auto& arena = arenas_[key];
  if (!arena) arena = std::make_unique<Arena>(key);
  return *arena;
}

// Only with mutex_ held.
Arena* Saver::arena_of(Address address) {
  for (auto& [key, arena] : arenas_) {
    if (arena->owns(address)) return arena.get();
  }
  return nullptr;
}

std::vector<int> Saver::peers_of(int device) {
  std::vector<int> peers;
  if (!settings_.peer_access) return peers;
  for (int peer = 0; peer < driver_->device_count(); ++peer) {
    if (peer != device) peers.push_back(peer);
  }
  return peers;
}

// Memory behind a range, readable. The undo is on the transaction.
Chunk Saver::acquire(const Arena::Key& key, Address address, std::size_t bytes, Transaction& transaction) {
  const int device = key.device;
  try {
    const Handle handle = driver_->create(device, bytes);
    const auto mapped_at = std::make_shared<Address>(0);
    transaction.on_rollback([=] { give_back_handle({device, handle, bytes, *mapped_at}); });
    driver_->map(device, address, bytes, handle);
    *mapped_at = address;
    driver_->allow_access(device, address, bytes, peers_of(device));
    return {address, bytes, handle};
  } catch (Error& error) {
    throw error.with_tag(key.tag).with_device(device).with_bytes(bytes);
  }
}

// Unmaps a handle where it is still mapped, and gives it back. What the driver refuses is kept, to try again at the
// next operation.
void Saver::give_back_handle(Orphan orphan) noexcept {
  try {
    if (orphan.mapped_at != 0) driver_->unmap(orphan.device, orphan.mapped_at, orphan.bytes);
    const Address unmapped = std::exchange(orphan.mapped_at, 0);
    if (Arena* const arena = std::exchange(orphan.arena, nullptr)) {
      const std::lock_guard<std::mutex> lock(mutex_);
      arena->reclaim(unmapped, orphan.bytes);
    }
    driver_->release(orphan.device, orphan.handle, orphan.bytes);
  } catch (const Error& error) {
    note_failure(error);
    warn(std::string("memory was not taken back, the next operation tries again: ") + error.what());
    const std::lock_guard<std::mutex> lock(mutex_);
    orphans_.push_back(orphan);
  }
}

Address Saver::allocate(const Arena::Key& key, std::size_t bytes) {
  return guarded([&] {
    Arena* arena = nullptr;
    Arena::Place place{};
    try {
      release_orphans();
      const std::lock_guard<std::mutex> lock(mutex_);
      arena = &arena_for(key);
      const DeviceInfo& info = infos_.at(key.device);
      bytes = round_up(std::max<std::size_t>(bytes, 1), info.granularity);
      auto found = arena->take(bytes);
      if (!found) {
        // A span as large as the device: released allocations keep their addresses, so more may be needed later.
        // The unused end keeps neighbouring spans apart: nothing may lie in two reservations.
        const std::size_t span = round_up(std::max(bytes, info.total_bytes), info.granularity);
        arena->add_span(driver_->reserve(key.device, span + guard_bytes(key.device)), span);
        found = arena->take(bytes);
      }
      place = *found;
      if (place.mapped) {
        arena->add_allocation(place.address, bytes);
        return place.address;
      }
    } catch (Error& error) {
      throw error.with_tag(key.tag).with_device(key.device).with_bytes(bytes);
    }
    std::vector<Chunk> chunks;
    try {
      check_margin(key, bytes);
      Transaction transaction;
      Address at = place.address;
      const auto sizes = keeps_content(key.restore) ? chunk_sizes(bytes) : std::vector<std::size_t>{bytes};
      for (const std::size_t size : sizes) {
        chunks.push_back(acquire(key, at, size, transaction));
        at += size;
      }
      transaction.commit();
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      RangeSet unused;
      unused.add(place.address, bytes);
      for (auto& orphan : orphans_) {
        if (orphan.mapped_at < place.address || orphan.mapped_at >= place.address + bytes) continue;
        orphan.arena = arena;
        unused.remove(orphan.mapped_at, orphan.bytes);
      }
      for (const auto& [begin, size] : unused.ranges()) arena->reclaim(begin, size);
      throw;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    arena->add_allocation(place.address, bytes);
    for (const auto& chunk : chunks) arena->add_chunk(chunk);
    return place.address;
  });
}

void Saver::check_margin(const Arena::Key& key, std::size_t bytes) {
  const std::size_t margin = memory_margin_;
  if (margin == 0) return;
  const MemoryInfo memory = driver_->memory_info(key.device);
  if (margin <= memory.free_bytes && bytes <= memory.free_bytes - margin) return;
  throw Error(ErrorKind::out_of_device_memory, "the allocation would leave less free than the memory margin")
      .with_tag(key.tag)
      .with_device(key.device)
      .with_memory(bytes + margin, memory.free_bytes);
}

void Saver::free(Address address) {
  if (closed_) return;
  check_process();
  std::unique_lock<std::mutex> lock(mutex_);
  Arena* arena = arena_of(address);
  if (arena == nullptr || arena->allocations().find(address) == arena->allocations().end()) {
    throw Error(ErrorKind::configuration, "free of an address that is not a live allocation").with_address(address);
  }
  if (arena->defer_free(address)) return;
  free_now(lock, *arena, address);
}

// With the lock held; lets go of it around driver calls and returns with it held.
void Saver::free_now(std::unique_lock<std::mutex>& lock, Arena& arena, Address address) {
  const int device = arena.key().device;
  for (auto& block : arena.allocations().at(address).blocks) give_backup_back(block, device);
  const std::vector<Chunk> chunks = arena.remove_allocation(address);
  if (chunks.empty()) return;
  lock.unlock();
  // Like cudaFree: whatever still runs may use this memory.
  bool idle = true;
  try {
    driver_->synchronize(device);
  } catch (const Error& error) {
    note_failure(error);
    warn(std::string("memory that was freed stays mapped until the next release: ") + error.what());
    idle = false;
  }
  for (const auto& chunk : chunks) {
    bool unmapped = false;
    try {
      if (idle) {
        driver_->unmap(device, chunk.address, chunk.bytes);
        unmapped = true;
      }
    } catch (const Error& error) {
      note_failure(error);
      warn(std::string("memory that was freed stays mapped until the next release: ") + error.what());
    }
    if (unmapped) give_back_handle({device, chunk.handle, chunk.bytes});
    lock.lock();
    if (unmapped) {
      arena.reclaim(chunk.address, chunk.bytes);
    } else {
      arena.keep_chunk(chunk);
    }
    lock.unlock();
  }
  lock.lock();
}

// Only with mutex_ held.
void Saver::give_backup_back(Block& block, int device) {
  if (!block.host.empty()) pool_of(device).give(std::exchange(block.host, {}));
  files_.give(std::exchange(block.file, {}));
  block.kept = Kept::nothing;
  block.has_digest = false;
}

void Saver::drop(Arena& arena, const Chunk& chunk, Restore restore) {
  const int device = arena.key().device;
  try {
    driver_->unmap(device, chunk.address, chunk.bytes);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      arena.drop_chunk(chunk.address, restore);
    }
    try {
      driver_->release(device, chunk.handle, chunk.bytes);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      orphans_.push_back({device, chunk.handle, chunk.bytes});
      throw;
    }
  } catch (Error& error) {
    throw error.with_tag(arena.key().tag).with_device(device).with_bytes(chunk.bytes);
  }
}

void Saver::release_orphans() {
  std::vector<Orphan> orphans;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (orphans_.empty()) return;
    orphans = std::exchange(orphans_, {});
  }
  for (const auto& orphan : orphans) give_back_handle(orphan);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& orphan : orphans_) {
    if (orphan.mapped_at == 0) continue;
    // Nothing can be mapped where something is; so nothing may begin until the driver lets go of it.
    throw Error::from_driver(ErrorKind::driver, "unmap", "REFUSED", "an earlier failure left a range mapped")
        .with_device(orphan.device)
        .with_bytes(orphan.bytes)
        .with_address(orphan.mapped_at);
  }
}

void Saver::end_operation(const std::vector<Arena*>& arenas) {
  progress_.end();
  std::unique_lock<std::mutex> lock(mutex_);
  for (Arena* arena : arenas) {
    for (const Address address : arena->end_operation()) free_now(lock, *arena, address);
  }
}

void Saver::on_each_device(std::map<int, DeviceWork>& work, const std::function<void(DeviceWork&)>& run) {
  std::vector<std::exception_ptr> failures(work.size());
  std::vector<std::function<void()>> unstarted;
  std::vector<std::thread> threads;
  std::size_t index = 0;
  for (auto& [device, each] : work) {
    const auto task = [&run, &each = each, &failure = failures[index++]] {
      try {
        run(each);
      } catch (Error& error) {
        error.with_tag(each.tags()).with_device(each.device).with_bytes(each.bytes());
        failure = std::current_exception();
      } catch (...) {
        failure = std::current_exception();
      }
    };
    if (index == work.size()) {
      task();  // the last on this thread: with one device there is no other
    } else if (auto thread = sys::start_thread(task)) {
      threads.push_back(std::move(*thread));
    } else {
      unstarted.emplace_back(task);
    }
  }
  for (const auto& task : unstarted) task();
  for (auto& thread : threads) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

// Runs one operation: whatever happens in it, the arenas that it has begun to work on are free for others again, and an
// error names the tags and bytes that were in work.
void Saver::on_arenas(const Tags& tags, const std::map<int, DeviceWork>& work,
                      const std::function<void(std::vector<Arena*>&)>& run) {
  struct AtEnd {
    Saver& saver;
    std::vector<Arena*> arenas;
    ~AtEnd() { saver.end_operation(arenas); }
  };
  AtEnd operation{*this, {}};
  try {
    run(operation.arenas);
  } catch (Error& error) {
    std::string names;
    for (const auto& tag : tags) names += (names.empty() ? "" : ", ") + tag;
    std::size_t bytes = 0;
    for (const auto& [index, device] : work) {
      if (tags.empty()) names += (names.empty() ? "" : ", ") + device.tags();
      bytes += device.bytes();
    }
    error.with_tag(names).with_bytes(bytes);
    throw;
  }
}

OperationResult Saver::release(const Tags& tags, const std::vector<RangeSet::Range>& dead,
                               const std::map<std::string, Restore>& overrides) {
  check_process();  // before a lock that the parent may have held when it forked
  const std::lock_guard<std::mutex> operation(operation_mutex_);
  return guarded([&] {
    const auto start = std::chrono::steady_clock::now();
    OperationResult result;
    std::map<int, DeviceWork> work;
    on_arenas(tags, work, [&](std::vector<Arena*>& arenas) {
      release_orphans();
      std::map<HostPool*, std::size_t> host_bytes;
      std::size_t file_bytes = 0;
      std::size_t content_bytes = 0;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        releasing_ = true;
        for (auto& [key, owned] : arenas_) {
          if (!selected(tags, key.tag)) continue;
          Arena& arena = *owned;
          arenas.push_back(&arena);
          arena.begin_operation();
          if (arena.chunks().empty()) continue;
          const auto override_ = overrides.find(key.tag);
          const Restore restore = override_ != overrides.end() ? override_->second : key.restore;
          const bool keeping = keeps_content(restore);
          DeviceWork& device = work[key.device];
          device.device = key.device;
          for (const auto& [address, chunk] : arena.chunks()) {
            (keeping ? device.kept : device.others).push_back({&arena, chunk, restore});
          }
          for (auto& [address, allocation] : arena.allocations()) {
            if (!keeping) {
              // What was kept of content that is here again says nothing about what is discarded now.
              for (auto& block : allocation.blocks) {
                if (arena.is_mapped(address + block.offset, block.bytes)) give_backup_back(block, key.device);
              }
              continue;
            }
            make_blocks(allocation);
            for (auto& block : allocation.blocks) {
              // A block that lost a chunk to a release that failed later was kept before that.
              if (!arena.is_mapped(address + block.offset, block.bytes)) continue;
              ContentBlock content;
              content.tag = key.tag;
              content.base = address;
              content.block = &block;
              content.live = live_extents(allocation, block, dead);
              content.to_file = restore == Restore::file;
              const std::size_t live = sum_of(content.live);
              const std::size_t room = round_up(live, page_bytes());
              content_bytes += live;
              if (content.to_file) {
                if (block.file.bytes != room) file_bytes += room;
              } else {
                std::size_t owned_bytes = 0;
                for (const auto& range : block.host) owned_bytes += range.bytes;
                if (owned_bytes != room) host_bytes[&pool_of(key.device)] += room;
              }
              device.blocks.push_back(std::move(content));
            }
          }
        }
      }
      for (auto& [pool, bytes] : host_bytes) pool->check(bytes);
      if (file_bytes > 0) files_.check(file_bytes);
      std::vector<std::unique_ptr<HostPool::Urgent>> urgent;
      for (auto& [pool, bytes] : host_bytes) {
        urgent.push_back(std::make_unique<HostPool::Urgent>(*pool));
        pool->start_growth(bytes);
      }
      progress_.begin(Progress::Operation::release, content_bytes);
      for (auto& [index, device] : work) {
        driver_->synchronize(index);
        const auto by_address = [](const auto& a, const auto& b) { return a.chunk.address < b.chunk.address; };
        std::sort(device.kept.begin(), device.kept.end(), by_address);
        std::sort(device.blocks.begin(), device.blocks.end(),
                  [](const auto& a, const auto& b) { return a.begin() < b.begin(); });
      }
      const auto give_up = [this, start](DeviceWork& device, const DeviceWork::Owned& owned) {
        drop(*owned.arena, owned.chunk, owned.restore);
        device.done_bytes[owned.arena->key().tag] += owned.chunk.bytes;
        if (device.freed_bytes < kFirstMemory) device.first_memory_seconds = seconds_since(start);
        device.freed_bytes += owned.chunk.bytes;
      };
      on_each_device(work, [this, &give_up](DeviceWork& device) {
        if (device.kept.empty()) return;
        std::vector<ChunkRange> ranges;
        for (const auto& owned : device.kept) ranges.push_back({owned.chunk.address, owned.chunk.bytes});
        device.seconds = pipeline_of(device.device).save(device.blocks, ranges, [&](std::size_t i) {
          give_up(device, device.kept[i]);
        });
      });
      on_each_device(work, [&give_up](DeviceWork& device) {
        const auto begin = std::chrono::steady_clock::now();
        for (const auto& owned : device.others) give_up(device, owned);
        device.seconds.driver += seconds_since(begin);
      });
      result.tags = outcomes(arenas, work, true);
    });
    for (const auto& [index, device] : work) {
      result.devices.push_back(index);
      result.first_memory_seconds = std::max(result.first_memory_seconds, device.first_memory_seconds);
      result.work.host_memory = std::max(result.work.host_memory, device.seconds.host_memory);
      result.work.digest = std::max(result.work.digest, device.seconds.digest);
      result.work.copy = std::max(result.work.copy, device.seconds.copy);
      result.work.driver = std::max(result.work.driver, device.seconds.driver);
    }
    result.seconds = seconds_since(start);
    return result;
  });
}

OperationResult Saver::resume(const Tags& tags) {
  check_process();
  const std::lock_guard<std::mutex> operation(operation_mutex_);
  return guarded([&] {
    const auto start = std::chrono::steady_clock::now();
    OperationResult result;
    std::map<int, DeviceWork> work;
    on_arenas(tags, work, [&](std::vector<Arena*>& arenas) {
      release_orphans();
      std::size_t content_bytes = 0;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        releasing_ = false;
        for (auto& [key, owned] : arenas_) {
          if (!selected(tags, key.tag)) continue;
          Arena& arena = *owned;
          arenas.push_back(&arena);
          arena.begin_operation();
          const auto runs = arena.released_runs();
          if (runs.empty()) continue;
          DeviceWork& device = work[key.device];
          device.device = key.device;
          bool kept = false;
          for (auto& [address, allocation] : arena.allocations()) {
            for (auto& block : allocation.blocks) {
              if (block.kept == Kept::nothing || arena.is_mapped(address + block.offset, block.bytes)) continue;
              kept = true;
              ContentBlock content;
              content.tag = key.tag;
              content.base = address;
              content.block = &block;
              content_bytes += block.content_bytes();
              device.blocks.push_back(std::move(content));
            }
          }
          for (const auto& run : runs) {
            Address at = run.begin;
            for (const std::size_t size : chunk_sizes(run.bytes)) {
              const Restore owed = arena.owes(Restore::zero, at, size) ? Restore::zero : Restore::discard;
              (kept ? device.kept : device.others).push_back({&arena, {at, size, Handle{}}, owed});
              at += size;
            }
          }
        }
      }
      for (auto& [index, device] : work) {
        std::size_t needed = 0;
        for (const auto* list : {&device.kept, &device.others}) {
          for (const auto& owned : *list) needed += owned.chunk.bytes;
        }
        const MemoryInfo memory = driver_->memory_info(index);
        if (needed > memory.free_bytes) {
          throw Error(ErrorKind::out_of_device_memory, "the device has too little free memory to resume")
              .with_device(index)
              .with_memory(needed, memory.free_bytes)
              .with_advice("everything stays released with its backup; let other processes free memory and repeat");
        }
        const auto by_address = [](const auto& a, const auto& b) { return a.chunk.address < b.chunk.address; };
        std::sort(device.kept.begin(), device.kept.end(), by_address);
        std::sort(device.blocks.begin(), device.blocks.end(),
                  [](const auto& a, const auto& b) { return a.begin() < b.begin(); });
      }
      progress_.begin(Progress::Operation::resume, content_bytes);
      // Undone, on failure, while the arenas are still busy: no other call may take the ranges meanwhile.
      struct Undo {
        std::map<int, DeviceWork>& work;
        ~Undo() {
          for (auto& [index, device] : work) device.transaction.rollback();
        }
      };
      const Undo undo{work};
      on_each_device(work, [this](DeviceWork& device) {
        auto plan = device.kept;
        plan.insert(plan.end(), device.others.begin(), device.others.end());
        std::vector<ChunkRange> ranges;
        for (const auto& owned : plan) {
          ranges.push_back({owned.chunk.address, owned.chunk.bytes, owned.restore == Restore::zero});
        }
        device.seconds = pipeline_of(device.device)
                             .restore(
                                 device.blocks, ranges,
                                 [&](std::size_t i) {
                                   const auto& owned = plan[i];
                                   const Chunk chunk = acquire(owned.arena->key(), owned.chunk.address,
                                                               owned.chunk.bytes, device.transaction);
                                   device.acquired.push_back({owned.arena, chunk, owned.restore});
                                 },
                                 verify());
      });
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto& [index, device] : work) {
          for (const auto& owned : device.acquired) {
            owned.arena->add_chunk(owned.chunk);
            device.done_bytes[owned.arena->key().tag] += owned.chunk.bytes;
          }
        }
      }
      for (auto& [index, device] : work) device.transaction.commit();
      result.tags = outcomes(arenas, work, false);
    });
    for (const auto& [index, device] : work) {
      result.devices.push_back(index);
      result.work.host_memory = std::max(result.work.host_memory, device.seconds.host_memory);
      result.work.digest = std::max(result.work.digest, device.seconds.digest);
      result.work.copy = std::max(result.work.copy, device.seconds.copy);
      result.work.driver = std::max(result.work.driver, device.seconds.driver);
    }
    result.seconds = seconds_since(start);
    if (!work.empty()) retain();
    return result;
  });
}

std::vector<TagOutcome> Saver::outcomes(const std::vector<Arena*>& arenas, const std::map<int, DeviceWork>& work,
                                        bool releasing) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::string, TagOutcome> tags;
  for (const Arena* arena : arenas) {
    TagOutcome& outcome = tags[arena->key().tag];
    outcome.tag = arena->key().tag;
    const std::string restore = name_of(arena->key().restore);
    outcome.restore = outcome.restore.empty() || outcome.restore == restore ? restore : "mixed";
    outcome.bytes += arena->live_bytes();
    if (!arena->released_runs().empty()) outcome.state = "released";
  }
  for (const auto& [index, device] : work) {
    for (const auto& [tag, bytes] : device.done_bytes) {
      (releasing ? tags[tag].released_bytes : tags[tag].resumed_bytes) += bytes;
      tags[tag].already = false;
    }
    for (const auto& content : device.blocks) {
      TagOutcome& outcome = tags[content.tag];
      const std::size_t bytes = content.block->content_bytes();
      switch (content.outcome) {
        case ContentBlock::Outcome::none:
          break;
        case ContentBlock::Outcome::copied:
          (releasing ? outcome.backed_up_bytes : outcome.restored_bytes) += bytes;
          break;
        case ContentBlock::Outcome::unchanged:
          outcome.unchanged_bytes += bytes;
          break;
        case ContentBlock::Outcome::zero:
          outcome.zero_bytes += bytes;
          break;
      }
    }
  }
  std::vector<TagOutcome> list;
  for (auto& [tag, outcome] : tags) {
    if (outcome.state.empty()) outcome.state = "resident";
    list.push_back(std::move(outcome));
  }
  return list;
}

// What the retention policy says, off the path of the resume that called for it: with operation_mutex_ held, so one
// that has not begun yet waits for this resume, and does its work too.
void Saver::retain() {
  if (settings_.retention != Retention::keep) trim_later(settings_.retention == Retention::free);
}

// Only with operation_mutex_ held.
void Saver::trim_later(bool drop_backups) {
  drops_later_ = drops_later_ || drop_backups;
  if (retainer_waits_) return;
  if (retainer_.joinable()) retainer_.join();
  retainer_waits_ = true;
  auto retainer = sys::start_thread([this] {
    const std::lock_guard<std::mutex> operation(operation_mutex_);
    retainer_waits_ = false;
    if (std::exchange(drops_later_, false)) drop_backups_now({});
    std::vector<HostPool*> pools;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [node, pool] : pools_) pools.push_back(pool.get());
    }
    for (HostPool* pool : pools) pool->trim();
  });
  if (retainer) {
    retainer_ = std::move(*retainer);
  } else {
    retainer_waits_ = false;
    warn("no thread can be started to unpin backup memory; the next resume tries again");
  }
}

void Saver::prepare_backup() {
  guarded([&] {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::map<HostPool*, std::size_t> wanted;
    for (auto& [key, arena] : arenas_) {
      if (key.restore != Restore::host || arena->busy()) continue;
      const std::size_t bytes = unpinned_bytes(*arena);
      try {
        wanted[&pool_of(key.device)] += bytes;
      } catch (Error& error) {
        throw error.with_tag(key.tag).with_device(key.device).with_bytes(bytes);
      }
    }
    for (auto& [pool, bytes] : wanted) pool->start_growth(bytes);
    return 0;
  });
}

void Saver::wait_until_prepared() {
  guarded([&] {
    std::vector<HostPool*> pools;
    std::string tags;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (auto& [node, pool] : pools_) pools.push_back(pool.get());
      for (auto& [key, arena] : arenas_) {
        if (key.restore == Restore::host) tags += (tags.empty() ? "" : ", ") + key.tag;
      }
    }
    try {
      for (HostPool* pool : pools) pool->wait_for_growth();
    } catch (const Error& error) {
      Error named = error;  // others may wait for the same one
      throw named.with_tag(tags);
    }
    return 0;
  });
}

void Saver::synchronize() {
  guarded([&] {
    for (const int device : devices()) driver_->synchronize(device);
    return 0;
  });
}

// Only with mutex_ held.
HostPool& Saver::pool_of(int device) {
  const int node = infos_.at(device).numa_node;
  const auto found = pools_.find(node);
  if (found != pools_.end()) return *found->second;
  std::set<int> nodes;
  for (int i = 0; i < driver_->device_count(); ++i) nodes.insert(driver_->device_info(i).numa_node);
  auto pool = std::make_unique<HostPool>(*driver_, settings_.host_backup_limit / nodes.size(), node);
  return *pools_.emplace(node, std::move(pool)).first->second;
}

Pipeline& Saver::pipeline_of(int device) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pipelines_.find(device);
  if (found != pipelines_.end()) return *found->second;
  auto pipeline = std::make_unique<Pipeline>(*driver_, device, pool_of(device), files_, key_, progress_);
  return *pipelines_.emplace(device, std::move(pipeline)).first->second;
}

Verify Saver::verify() const {
  switch (settings_.verify) {
    case VerifyChoice::off:
      return Verify::off;
    case VerifyChoice::sampled:
      return Verify::sampled;
    case VerifyChoice::full:
      return Verify::full;
    case VerifyChoice::automatic:
      break;
  }
  return driver_->digest_is_cheap() ? Verify::full : Verify::sampled;
}

SaverStatus Saver::status() const {
  check_process();
  SaverStatus status;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::map<std::string, TagSnapshot> tags;
  bool released = false;
  bool busy = false;
  std::size_t unprepared = 0;
  for (const auto& [key, arena] : arenas_) {
    TagSnapshot& tag = tags[key.tag];
    tag.tag = key.tag;
    const std::string restore = name_of(key.restore);
    tag.restore = tag.restore.empty() || tag.restore == restore ? restore : "mixed";
    std::size_t away = 0;
    for (const auto& run : arena->released_runs()) away += run.bytes;
    tag.bytes += arena->live_bytes();
    tag.released_bytes += away;
    tag.resident_bytes += arena->live_bytes() - away;
    tag.mapped_by_device[key.device] += arena->mapped_bytes();
    tag.bytes_by_device[key.device] += arena->live_bytes();
    tag.retained_bytes += arena->retained_bytes();
    tag.allocations += arena->allocations().size();
    tag.chunks += arena->chunks().size();
    if (arena->busy()) {
      busy = true;
      tag.state = releasing_ ? "releasing" : "resuming";
      continue;  // the operation is writing to its blocks
    }
    if (away > 0) {
      released = true;
      if (tag.state.empty()) tag.state = "released";
    }
    for (const auto& [address, allocation] : arena->allocations()) {
      for (const auto& block : allocation.blocks) {
        if (block.kept != Kept::nothing) tag.backed_up_bytes += block.content_bytes();
      }
    }
    if (key.restore == Restore::host) unprepared += unpinned_bytes(*arena);
  }
  for (auto& [name, tag] : tags) {
    if (tag.state.empty()) tag.state = "resident";
    status.backup_bytes += tag.backed_up_bytes;
    status.tags.push_back(tag);
  }
  std::size_t spare = 0;
  for (const auto& [node, pool] : pools_) {
    const HostPoolStatus each = pool->status();
    status.pool.used_bytes += each.used_bytes;
    status.pool.capacity_bytes += each.capacity_bytes;
    status.pool.target_bytes += each.target_bytes;
    spare += each.capacity_bytes - each.used_bytes;
  }
  status.pool.limit_bytes = settings_.host_backup_limit;
  status.prepared = spare >= unprepared;
  status.file_bytes = files_.used_bytes();
  status.failure = failure_;
  status.state = !failure_.empty() ? "failed"
                 : busy            ? (releasing_ ? "releasing" : "resuming")
                 : released        ? "released"
                                   : "resident";
  const auto operation = progress_.operation.load();
  status.operation = operation == Progress::Operation::none      ? ""
                     : operation == Progress::Operation::release ? "release"
                                                                 : "resume";
  status.done_bytes = progress_.done_bytes;
  status.total_bytes = progress_.total_bytes;
  status.copied_bytes = progress_.copied_bytes;
  status.operation_seconds = progress_.seconds();
  return status;
}

std::vector<std::string> Saver::known_tags() const {
  check_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  std::set<std::string> tags;
  for (const auto& [key, arena] : arenas_) tags.insert(key.tag);
  return {tags.begin(), tags.end()};
}

std::vector<int> Saver::devices() const {
  check_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int> devices;
  for (const auto& [device, info] : infos_) devices.push_back(device);
  return devices;
}

bool Saver::owns(Address address) const {
  check_process();
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(arenas_.begin(), arenas_.end(), [&](const auto& each) { return each.second->owns(address); });
}

std::vector<std::string> Saver::audit(const std::map<int, std::size_t>& others) {
  std::vector<std::string> problems;
  std::map<int, std::size_t> device_bytes;
  std::size_t host_bytes = 0;
  std::size_t file_bytes = 0;
  std::size_t pool_bytes = 0;
  const std::lock_guard<std::mutex> operation(operation_mutex_);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [device, info] : infos_) device_bytes[device] = 0;
  for (const auto& [key, arena] : arenas_) {
    if (arena->busy()) problems.push_back("tag '" + key.tag + "': an operation never ended");
    RangeSet refused;
    for (const auto& orphan : orphans_) {
      if (orphan.arena == arena.get()) refused.add(orphan.mapped_at, orphan.bytes);
    }
    for (auto& problem : arena->audit(refused)) problems.push_back(std::move(problem));
    device_bytes[key.device] += arena->mapped_bytes();
    for (const auto& [address, allocation] : arena->allocations()) {
      for (const auto& block : allocation.blocks) {
        for (const auto& range : block.host) host_bytes += range.bytes;
        file_bytes += block.file.bytes;
      }
    }
  }
  for (const auto& orphan : orphans_) device_bytes[orphan.device] += orphan.bytes;
  for (const auto& [node, pool] : pools_) pool_bytes += pool->status().used_bytes;
  const auto compare = [&](const std::string& what, std::size_t counted, std::size_t expected) {
    if (counted == expected) return;
    problems.push_back(what + ": " + std::to_string(counted) + " bytes are out, and " + std::to_string(expected) +
                       " are accounted for");
  };
  compare("host memory", pool_bytes, host_bytes);
  compare("backup file", files_.used_bytes(), file_bytes);
  for (const auto& [device, bytes] : device_bytes) {
    const MemoryInfo memory = driver_->memory_info(device);
    const auto other = others.find(device);
    compare("device " + std::to_string(device), memory.total_bytes - memory.free_bytes,
            bytes + (other == others.end() ? 0 : other->second));
  }
  return problems;
}

}  // namespace memsaver
