// A saver's life, its allocations, and the frame in which operations run.

#include "vmm/saver.hpp"

#include <algorithm>
#include <exception>
#include <utility>

#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/log.hpp"
#include "support/sizes.hpp"
#include "support/transaction.hpp"

namespace memsaver {

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
  const auto attempt = [](const std::function<void()>& call) {
    try {
      call();
      return true;
    } catch (const std::exception& error) {
      warn(std::string("while giving addresses back: ") + error.what());
      return false;
    }
  };
  release_orphans(true);
  for (auto& [key, arena] : arenas_) {
    const int device = key.device;
    bool clear = attempt([&, &each = *arena] { refuse_orphans_of(each); });
    for (const auto& entry : arena->chunks()) {
      const Chunk& chunk = entry.second;
      Orphan orphan{device, chunk.handle, chunk.bytes, chunk.address};
      (void)take_back(orphan);
      clear = clear && orphan.mapped_at == 0;
    }
    if (!clear) continue;  // addresses that something is mapped at stay the driver's until the process ends
    for (const auto& span : arena->spans()) {
      attempt([&, device] { driver_->unreserve(device, span.first, span.second + guard_bytes(device)); });
    }
  }
}

void Saver::check_process() const {
  if (getpid() == process_) return;
  throw Error(ErrorKind::forked, "memsaver was set up in process " + std::to_string(process_) +
                                     " and cannot be used in its forked child " + std::to_string(getpid()) +
                                     "; start workers with the 'spawn' method");
}

void Saver::check_usable() const {
  check_process();
  const std::string why = driver_->loss();
  if (!why.empty()) throw Error(ErrorKind::context_lost, why).with_advice("restart the process");
}

bool Saver::selected(const Tags& tags, const std::string& tag) const {
  return tags.empty() || std::find(tags.begin(), tags.end(), tag) != tags.end();
}

// Asks the driver what later calls need to know of a device and its neighbours, without a lock.
void Saver::know_device(int device) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (infos_.find(device) != infos_.end()) return;
  }
  const DeviceInfo info = driver_->device_info(device);
  std::set<int> nodes;
  for (int each = 0; each < driver_->device_count(); ++each) {
    nodes.insert(each == device ? info.numa_node : driver_->device_info(each).numa_node);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  nodes_ = std::move(nodes);
  infos_.emplace(device, info);
}

// Only with mutex_ held.
Arena& Saver::arena_for(const Arena::Key& key) {
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
    if (error.kind == ErrorKind::out_of_device_memory) {
      try {
        error.with_memory(bytes, driver_->memory_info(device).free_bytes);
      } catch (const Error&) {
        // The first error is the one to tell.
      }
    }
    throw error.with_tag(key.tag).with_device(device).with_bytes(bytes);
  }
}

// Unmaps a handle where it is still mapped, and gives it back. What the driver refuses is kept, to try again at the
// next operation.
void Saver::give_back_handle(Orphan orphan) noexcept {
  if (take_back(orphan)) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  orphans_.push_back(std::move(orphan));
}

// Only with mutex_ held.
std::vector<Saver::Orphan>::iterator Saver::find_orphan(const Orphan& orphan) {
  return std::find_if(orphans_.begin(), orphans_.end(),
                      [&](const Orphan& each) { return each.device == orphan.device && each.handle == orphan.handle; });
}

// One attempt; whether nothing is left to do. `orphan`, and its entry where it has one, say what is.
bool Saver::take_back(Orphan& orphan) noexcept {
  try {
    if (orphan.mapped_at != 0) {
      driver_->unmap(orphan.device, orphan.mapped_at, orphan.bytes);
      orphan.mapped_at = 0;
      const std::lock_guard<std::mutex> lock(mutex_);
      if (const auto entry = find_orphan(orphan); entry != orphans_.end()) {
        entry->mapped_at = 0;
        for (const auto& range : std::exchange(entry->withheld, {})) entry->arena->reclaim(range.begin, range.bytes);
      }
    }
    driver_->release(orphan.device, orphan.handle, orphan.bytes);
  } catch (const Error& error) {
    warn(std::string("memory was not taken back, the next operation tries again: ") + error.what());
    return false;
  }
  return true;
}

Address Saver::allocate(const Arena::Key& key, std::size_t bytes) {
  check_usable();
  Arena* arena = nullptr;
  Arena::Place place{};
  std::vector<RangeSet::Range> ranges;
  try {
    release_orphans(false);
    know_device(key.device);
    std::unique_lock<std::mutex> lock(mutex_);
    arena = &arena_for(key);
    const DeviceInfo& info = infos_.at(key.device);
    bytes = round_up(std::max<std::size_t>(bytes, 1), info.granularity);
    auto found = arena->take(bytes);
    while (!found) {
      // A span as large as the device: released allocations keep their addresses, so more may be needed later.
      // The unused end keeps neighbouring spans apart: nothing may lie in two reservations.
      const std::size_t span = round_up(std::max(bytes, info.total_bytes), info.granularity);
      const std::size_t guard = guard_bytes(key.device);
      lock.unlock();
      const Address address = driver_->reserve(key.device, span + guard);
      lock.lock();
      arena->add_span(address, span);
      found = arena->take(bytes);
    }
    place = *found;
    if (place.mapped) {
      arena->add_allocation(place.address, bytes);
      return place.address;
    }
    ranges.push_back({place.address, bytes});
    if (keeps_content(key.restore)) ranges = arena->in_chunks(ranges.front());
  } catch (Error& error) {
    throw error.with_tag(key.tag).with_device(key.device).with_bytes(bytes);
  }
  std::vector<Chunk> chunks;
  try {
    check_margin(key, bytes);
    Transaction transaction;
    for (const auto& range : ranges) chunks.push_back(acquire(key, range.begin, range.bytes, transaction));
    transaction.commit();
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    arena->reclaim(place.address, bytes);
    withhold_orphans(*arena, place.address, bytes);
    throw;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  arena->add_allocation(place.address, bytes);
  for (const auto& chunk : chunks) arena->add_chunk(chunk);
  return place.address;
}

void Saver::check_margin(const Arena::Key& key, std::size_t bytes) {
  const std::size_t margin = memory_margin_;
  if (margin == 0) return;
  MemoryInfo memory{};
  try {
    memory = driver_->memory_info(key.device);
  } catch (Error& error) {
    throw error.with_tag(key.tag).with_device(key.device).with_bytes(bytes);
  }
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
  if (arena == nullptr || !arena->alive(address)) {
    throw Error(ErrorKind::configuration, "free of an address that is not a live allocation").with_address(address);
  }
  if (arena->defer_free(address)) return;
  free_now(lock, *arena, address);
  lock.unlock();
  if (arena->key().restore == Restore::file) files_.punch_holes();
}

// With the lock held; lets go of it around driver calls and returns with it held.
void Saver::free_now(std::unique_lock<std::mutex>& lock, Arena& arena, Address address) {
  const int device = arena.key().device;
  Allocation& allocation = arena.allocations().at(address);
  const std::size_t bytes = allocation.bytes;
  for (auto& block : allocation.blocks) give_backup_back(block, device);
  const std::vector<Chunk> chunks = arena.remove_allocation(address);
  withhold_orphans(arena, address, bytes);
  if (chunks.empty()) return;
  lock.unlock();
  // Like cudaFree: whatever still runs may use this memory.
  bool idle = true;
  try {
    driver_->synchronize(device);
  } catch (const Error& error) {
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
  block.damaged = false;
}

// Tries again what the driver refused earlier. Where another thread is just at it: waits for it, or leaves it to it.
void Saver::release_orphans(bool wait) {
  std::unique_lock<std::mutex> one_at_a_time(orphans_mutex_, std::defer_lock);
  if (wait) {
    one_at_a_time.lock();
  } else if (!one_at_a_time.try_lock()) {
    return;
  }
  std::vector<Orphan> orphans;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    orphans = orphans_;
  }
  for (auto& orphan : orphans) {
    if (!take_back(orphan)) continue;
    const std::lock_guard<std::mutex> lock(mutex_);
    orphans_.erase(find_orphan(orphan));
  }
}

// Nothing can be mapped where something is, and what is mapped is not released: an operation on this arena waits until
// the driver lets go. Only with mutex_ held.
void Saver::refuse_orphans_of(const Arena& arena) const {
  for (const auto& orphan : orphans_) {
    if (orphan.mapped_at == 0 || !arena.owns(orphan.mapped_at)) continue;
    throw Error::from_driver(ErrorKind::driver, "unmap", "REFUSED", "an earlier failure left a range mapped")
        .with_tag(arena.key().tag)
        .with_device(orphan.device)
        .with_bytes(orphan.bytes)
        .with_address(orphan.mapped_at);
  }
}

// Keeps free addresses that are mapped after all from being taken, until they are unmapped. Only with mutex_ held.
void Saver::withhold_orphans(Arena& arena, Address address, std::size_t bytes) {
  for (auto& orphan : orphans_) {
    if (orphan.mapped_at == 0) continue;
    const Address from = std::max(address, orphan.mapped_at);
    const Address to = std::min(address + bytes, orphan.mapped_at + orphan.bytes);
    if (from >= to) continue;
    arena.withhold(from, to - from);
    orphan.arena = &arena;
    orphan.withheld.push_back({from, to - from});
  }
}

// The frame of release and resume, which run one at a time. Each arena of `tags` becomes busy and is planned at the
// same instant (`plan`, with mutex_ held), then `run` does the work. Whatever happens, in the end the arenas are free
// for others again, and an error names the tags and bytes that were in work.
OperationResult Saver::operate(Progress::Operation kind, const Tags& tags,
                               const std::function<void(Arena&, Operation&)>& plan,
                               const std::function<void(Operation&)>& run) {
  check_process();  // before a lock that the parent may have held when it forked
  const std::lock_guard<std::mutex> one_at_a_time(operation_mutex_);
  check_usable();
  Operation operation(kind);
  OperationResult result;
  {
    struct AtEnd {
      Saver& saver;
      Operation& operation;
      ~AtEnd() { saver.end_operation(operation); }
    };
    const AtEnd at_end{*this, operation};
    try {
      release_orphans(true);
      check_usable();
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        releasing_ = kind == Progress::Operation::release;
        for (const auto& [key, arena] : arenas_) {
          if (selected(tags, key.tag)) refuse_orphans_of(*arena);
        }
        for (auto& [key, arena] : arenas_) {
          if (!selected(tags, key.tag)) continue;
          operation.arenas.push_back(arena.get());
          arena->begin_operation();
          plan(*arena, operation);
        }
      }
      files_.punch_holes();
      run(operation);
      check_usable();  // what was absorbed on the way may have been the loss of the context
      const std::lock_guard<std::mutex> lock(mutex_);
      result = operation.result();
    } catch (Error& error) {
      std::string names;
      for (const auto& tag : tags) names += (names.empty() ? "" : ", ") + tag;
      std::size_t bytes = 0;
      for (const auto& [index, device] : operation.devices) {
        if (tags.empty()) names += (names.empty() ? "" : ", ") + device.tags();
        bytes += device.bytes();
      }
      error.with_tag(names).with_bytes(bytes);
      throw;
    }
  }
  result.seconds = operation.seconds();
  return result;
}

void Saver::end_operation(const Operation& operation) {
  progress_.end();
  std::unique_lock<std::mutex> lock(mutex_);
  for (Arena* arena : operation.arenas) {
    for (const Address address : arena->end_operation()) free_now(lock, *arena, address);
  }
  lock.unlock();
  files_.punch_holes();
}

void Saver::synchronize() {
  check_usable();
  for (const int device : devices()) driver_->synchronize(device);
}

void Saver::trim_graph_memory() {
  check_usable();
  for (const int device : devices()) driver_->trim_graph_memory(device);
}

Pipeline& Saver::pipeline_of(int device) {
  HostPool* pool = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pipelines_.find(device);
    if (found != pipelines_.end()) return *found->second;
    pool = &pool_of(device);
  }
  auto pipeline = std::make_unique<Pipeline>(*driver_, device, *pool, files_, key_, progress_);
  const std::lock_guard<std::mutex> lock(mutex_);
  return *pipelines_.emplace(device, std::move(pipeline)).first->second;
}

}  // namespace memsaver
