#include "vmm/saver.hpp"

#include "backup/kept_content.hpp"

namespace memsaver {

Saver::Saver(std::unique_ptr<Driver> driver, Settings settings)
    : driver_(std::move(driver)),
      physical_(*driver_, map_, settings.peer_access),
      stacks_(*driver_, map_, physical_),
      backups_(*driver_, settings, progress_, [this]() REQUIRES(backups_.operation_mutex) { drop_resident({}); }) {}

Saver::~Saver() {
  if (getpid() != process_) (void)driver_.release();
}

void Saver::add_device(int device) {
  if (map_.knows(device)) return;
  const DeviceInfo info = driver_->device_info(device);
  std::set<int> nodes;
  for (int each = 0; each < driver_->device_count(); ++each) {
    nodes.insert(each == device ? info.numa_node : driver_->device_info(each).numa_node);
  }
  backups_.add_device(device, info, nodes.size());
  map_.add_device(device, info);
}

Address Saver::allocate(const Arena::Key& key, std::size_t bytes) {
  check_usable();
  ++allocating_;
  const Cleanup at_end([this] { --allocating_; });
  backups_.refuse_link();
  try {
    physical_.retry(false);
    add_device(key.device);
    Lock lock(map_.mutex);
    const DeviceInfo& info = map_.info_of(key.device);
    Arena& arena = map_.arena_for({key.device, key.tag, key.restore, round_up(key.chunk_bytes, info.granularity)});
    bytes = round_up(std::max<std::size_t>(bytes, 1), info.granularity);
    std::optional<Arena::Place> place;
    while (!(place = arena.take(bytes))) {
      lock.unlock();
      physical_.add_addresses(arena, bytes, info);
      lock.lock();
    }
    std::vector<Chunk> chunks;
    if (!place->mapped) {
      const RangeSet::Range range{place->address, bytes};
      const bool divided = keeps_content(key.restore) || key.chunk_bytes != 0;
      const auto ranges = divided ? arena.in_chunks(range) : std::vector{range};
      lock.unlock();
      chunks = acquire(arena, ranges);
      lock.lock();
    }
    arena.add_allocation(place->address, bytes);
    for (const auto& chunk : chunks) arena.add_chunk(chunk);
    return place->address;
  } catch (Error& error) {
    throw error.with_tag(key.tag).with_device(key.device).with_bytes(bytes);
  }
}

std::vector<Chunk> Saver::acquire(Arena& arena, const std::vector<RangeSet::Range>& ranges) {
  const int device = arena.key().device;
  const std::size_t bytes = sum_of(ranges);
  std::vector<Chunk> chunks;
  Cleanup undo([&] {
    const Lock lock(map_.mutex);
    arena.reclaim(ranges.front().begin, bytes);
    physical_.withhold(map_, arena, ranges.front().begin, bytes);
  });
  if (const std::size_t margin = memory_margin_) {
    const MemoryInfo memory = driver_->memory_info(device);
    if (margin > memory.free_bytes || bytes > memory.free_bytes - margin) {
      throw Error(ErrorKind::out_of_device_memory, "the allocation would leave less free than the memory margin")
          .with_memory(bytes + margin, memory.free_bytes);
    }
  }
  for (const auto& range : ranges) chunks.push_back(physical_.acquire(arena.key(), range.begin, range.bytes, undo));
  undo.dismiss();
  return chunks;
}

bool Saver::idle() const {
  if (closed_ || allocating_ != 0 || !physical_.reserved_by_device().empty()) return false;
  const Lock lock(map_.mutex);
  const auto arenas = map_.select({});
  return std::all_of(arenas.begin(), arenas.end(), [](const Arena* arena) { return arena->chunks().empty(); });
}

void Saver::stop_lending() {
  check_process();
  backups_.refuse_link();
  if (backups_.shared() != nullptr) backups_.shared()->unmap_lent();
}

std::vector<SavedAllocation> Saver::saved(const std::string& tag) const {
  check_process();
  const auto is_saved = [](const Block& block) {
    return block.digest && (block.kept == Kept::zero || (block.kept == Kept::host && block.shared));
  };
  std::vector<SavedAllocation> all;
  const Lock lock(map_.mutex);
  for (const Arena* const arena : map_.select({tag})) {
    for (const auto& [address, allocation] : arena->allocations()) {
      const auto& blocks = allocation.blocks;
      if (blocks.empty() || arena->busy() || !std::all_of(blocks.begin(), blocks.end(), is_saved)) continue;
      std::vector<SavedBlock> saved;
      for (const auto& block : blocks) {
        std::vector<std::pair<std::size_t, std::size_t>> extents;
        for (const auto& extent : block.extents) extents.emplace_back(extent.offset, extent.bytes);
        const auto [lane0, lane1, any] = *block.digest;
        saved.emplace_back(block.offset, block.bytes, std::move(extents), std::tuple(lane0, lane1, any));
      }
      all.emplace_back(address, allocation.bytes, std::move(saved));
    }
  }
  return all;
}

Address Saver::adopt(const Arena::Key& key, std::size_t bytes, const std::vector<SavedBlock>& saved) {
  check_usable();
  if (backups_.shared() == nullptr) throw Error(ErrorKind::configuration, "this process uses no shared store");
  add_device(key.device);
  driver_->prepare_digest(key.device);
  std::vector<Block> blocks;
  Cleanup undo([&] {
    for (auto& block : blocks) backups_.give_back(block, key.device);
    backups_.flush();
  });
  try {
    for (const auto& block : saved) blocks.push_back(adopted(block));
  } catch (Error& error) {
    throw error.with_tag(key.tag);
  }
  Lock lock(map_.mutex);
  const DeviceInfo& info = map_.info_of(key.device);
  std::size_t end = 0;
  for (const auto& block : blocks) end = block.offset == end && block.bytes <= kBlockBytes ? end + block.bytes : 0;
  if (bytes == 0 || end != bytes || bytes % info.granularity != 0) {
    throw Error(ErrorKind::backup, "the saved blocks are not an allocation of this device");
  }
  Arena& arena = map_.arena_for(key);
  std::optional<Arena::Place> place;
  while (!(place = arena.take(bytes, true))) {
    lock.unlock();
    physical_.add_addresses(arena, bytes, info);
    lock.lock();
  }
  arena.add_released(place->address, bytes, std::move(blocks));
  undo.dismiss();
  return place->address;
}

Block Saver::adopted(const SavedBlock& saved) {
  const auto& [offset, bytes, extents, lanes] = saved;
  Block block;
  block.offset = offset;
  block.bytes = bytes;
  block.adopted = true;
  for (const auto& [begin, length] : extents) block.extents.push_back({begin, length});
  const Digest digest{std::get<0>(lanes), std::get<1>(lanes), std::get<2>(lanes)};
  block.digest = digest;
  block.kept = digest.any == 0 ? Kept::zero : Kept::host;
  if (block.kept == Kept::zero) return block;
  SharedStore& store = *backups_.shared();
  Cleanup undo([&] {
    if (block.shared) store.give(*block.shared);
  });
  if (store.find(block, digest) != SharedStore::Found::kept) {
    throw Error(ErrorKind::backup, "the shared store lacks a block").with_bytes(bytes);
  }
  undo.dismiss();
  return block;
}

void Saver::free(Address address) {
  if (closed_) return;
  check_process();
  Arena* arena = nullptr;
  std::vector<Chunk> chunks;
  bool had_backup = false;
  {
    const Lock lock(map_.mutex);
    arena = map_.arena_of(address);
    if (arena == nullptr || !arena->alive(address)) {
      throw Error(ErrorKind::configuration, "free of an address that is not a live allocation").with_address(address);
    }
    if (arena->defer_free(address)) return;
    const auto& blocks = arena->allocations().at(address).blocks;
    had_backup = std::any_of(blocks.begin(), blocks.end(), [](const Block& block) { return block.has_memory(); });
    chunks = remove(*arena, address);
  }
  physical_.give_back(*arena, chunks);
  if (had_backup) backups_.flush();
}

std::vector<Chunk> Saver::remove(Arena& arena, Address address) {
  Allocation& allocation = arena.allocations().at(address);
  const std::size_t bytes = allocation.bytes;
  for (auto& block : allocation.blocks) backups_.give_back(block, arena.key().device);
  std::vector<Chunk> chunks = arena.remove_allocation(address);
  physical_.withhold(map_, arena, address, bytes);
  return chunks;
}

void Saver::drop_resident(const Tags& tags) {
  const Lock lock(map_.mutex);
  for (Arena* const arena : map_.select(tags)) {
    drop_backups_if(*arena, [arena](Address at, std::size_t bytes) { return arena->is_mapped(at, bytes); });
  }
}

void Saver::prepare_backup() {
  check_usable();
  std::set<int> digesting;
  {
    const Lock lock(map_.mutex);
    for (const Arena* const arena : map_.select({})) {
      if (keeps_content(arena->key().restore)) digesting.insert(arena->key().device);
    }
  }
  for (const int device : digesting) {
    driver_->prepare_digest(device);
    if (backups_.packs() || backups_.shared() != nullptr) driver_->prepare_packing(device);
  }
  if (backups_.packs()) expect_backups();
  grow_backup_memory();
}

void Saver::grow_backup_memory() {
  check_usable();
  SharedStore* const shared = backups_.shared();
  std::map<HostPool*, std::size_t> wanted;
  std::size_t sum = 0;
  {
    const Lock lock(map_.mutex);
    sum = map_.unprepared_bytes();
    for (const Arena* const arena : map_.select({})) {
      const auto& key = arena->key();
      if (shared != nullptr || key.restore != Restore::host || arena->busy()) continue;
      wanted[&backups_.pool_of(key.device)] += arena->unprepared_bytes();
    }
  }
  for (HostPool* const pool : backups_.pools()) pool->start_growth(wanted[pool]);  // forgets what failed before
  if (shared != nullptr) shared->prepare_beyond(sum);
}

void Saver::wait_until_prepared() {
  check_usable();
  std::set<std::string> tags;
  {
    const Lock lock(map_.mutex);
    for (const Arena* const arena : map_.select({})) {
      if (arena->key().restore == Restore::host) tags.insert(arena->key().tag);
    }
  }
  try {
    for (HostPool* const pool : backups_.pools()) pool->wait_for_growth();
    if (backups_.shared() != nullptr) backups_.shared()->wait_until_prepared();
  } catch (const Error& error) {
    Error named = error;  // other threads may wait for the same one
    throw named.with_tag(joined({tags.begin(), tags.end()}));
  }
}

void Saver::synchronize() {
  check_usable();
  for (const int device : devices()) driver_->synchronize(device);
}

void Saver::trim_graph_memory() {
  check_usable();
  for (const int device : devices()) driver_->trim_graph_memory(device);
}

BackupView Saver::backup_of(Address address, std::size_t bytes, void* to) {
  check_process();
  const Lock operation(backups_.operation_mutex);
  BackupView view;
  KeptContent content;
  {
    const Lock lock(map_.mutex);
    const Arena* const arena = map_.arena_of(address);
    const Allocation* const allocation = arena == nullptr ? nullptr : arena->allocation_around(address, bytes);
    if (allocation == nullptr) {
      throw Error(ErrorKind::configuration, "this is not memory of a region").with_address(address).with_bytes(bytes);
    }
    view.tag = arena->key().tag;
    view.allocation = allocation->address;
    view.allocation_bytes = allocation->bytes;
    view.released = !arena->is_mapped(address, bytes);
    const std::size_t begin = address - allocation->address;
    const std::size_t end = begin + bytes;
    view.kept = allocation->blocks.empty() ? Kept::nothing : Kept::host;
    for (const auto& block : allocation->blocks) {
      const std::size_t from = std::max(begin, block.offset);
      const std::size_t until = std::min(end, block.offset + block.bytes);
      if (from >= until) continue;
      if (block.kept == Kept::nothing || block.kept == Kept::file) {
        view.kept = block.kept;
        return view;
      }
      content.add(block, from, until);
    }
  }
  if (view.kept != Kept::host) return view;
  view.memory = content.memory();
  if (to != nullptr) content.copy_to(to);
  return view;
}

void Saver::drop_backups(const Tags& tags, bool keep_memory) {
  check_process();
  const Lock operation(backups_.operation_mutex);
  drop_resident(tags);
  backups_.flush();
  if (!keep_memory) backups_.trim_later();
}

void Saver::trim_backup_memory(bool at_once) {
  check_process();
  if (at_once) {
    for (HostPool* const pool : backups_.pools()) pool->trim();
  } else {
    const Lock operation(backups_.operation_mutex);
    backups_.trim_later();
  }
}

void Saver::set_file_folder(const std::string& folder) {
  check_process();
  const Lock operation(backups_.operation_mutex);
  FileStore& files = backups_.files();
  if (files.move_to(folder)) return;
  drop_resident({});
  if (files.move_to(folder)) return;
  throw Error(ErrorKind::configuration, "the folder for backup files cannot change while backups lie in the old one")
      .with_bytes(files.used_bytes())
      .with_advice("resume what is released first");
}

SaverStatus Saver::status() const {
  check_process();
  SaverStatus status;
  {
    const Lock lock(map_.mutex);
    map_.describe(status);
    status.pool = backups_.pool_status();
    if (backups_.shared() != nullptr) status.shared = backups_.shared()->status();
    const std::size_t ready =
        backups_.shared() == nullptr
            ? status.pool.capacity_bytes - status.pool.used_bytes
            : status.shared.pinned_bytes - std::min(status.shared.pinned_bytes, status.shared.held_bytes);
    status.prepared = ready >= map_.unprepared_bytes();
  }
  status.reserved_by_device = physical_.reserved_by_device();
  status.file_bytes = backups_.files().used_bytes();
  status.failure = driver_->loss();
  if (!status.failure.empty()) status.state = "failed";
  const auto operation = progress_.operation.load();
  if (operation == Progress::Operation::release) status.operation = "release";
  if (operation == Progress::Operation::resume) status.operation = "resume";
  status.done_bytes = progress_.done_bytes;
  status.total_bytes = progress_.total_bytes;
  status.copied_bytes = progress_.copied_bytes;
  status.operation_seconds = progress_.seconds();
  return status;
}

std::vector<std::string> Saver::known_tags() const {
  check_process();
  const Lock lock(map_.mutex);
  std::set<std::string> tags;
  for (const Arena* const arena : map_.select({})) tags.insert(arena->key().tag);
  return {tags.begin(), tags.end()};
}

std::vector<int> Saver::devices() const {
  check_process();
  return map_.devices();
}

bool Saver::owns(Address address) const {
  check_process();
  const Lock lock(map_.mutex);
  return map_.arena_of(address) != nullptr;
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

void Saver::close() noexcept {
  closed_ = true;
  if (getpid() != process_) return;  // a lock may be held by a thread of the parent
  backups_.end();
  driver_->end();
}

}  // namespace memsaver
