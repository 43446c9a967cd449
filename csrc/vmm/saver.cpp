#include "vmm/saver.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "backup/kept_content.hpp"
#include "support/error.hpp"
#include "support/sizes.hpp"
#include "support/transaction.hpp"
#include "vmm/operation.hpp"

namespace memsaver {

namespace {

// Throws ErrorKind::out_of_device_memory if `bytes` more would leave less free than the memory margin.
void check_margin(Core& core, int device, std::size_t bytes) {
  const std::size_t margin = core.memory_margin;
  if (margin == 0) return;
  const MemoryInfo memory = core.driver->memory_info(device);
  if (margin <= memory.free_bytes && bytes <= memory.free_bytes - margin) return;
  throw Error(ErrorKind::out_of_device_memory, "the allocation would leave less free than the memory margin")
      .with_memory(bytes + margin, memory.free_bytes);
}

struct Placement {
  Arena* arena;
  Address address;
  std::vector<RangeSet::Range> chunks;  // to acquire; none if the range has memory, and then it is allocated already
};

// Finds a free range for an allocation, reserving more addresses if there is none, and takes it out of the arena.
// Rounds `bytes` up to what the device maps at once.
Placement place(Core& core, const Arena::Key& key, std::size_t& bytes) {
  core.learn_device(key.device);
  Lock lock(core.map.mutex);
  Arena& arena = core.map.arena_for(key);
  const DeviceInfo& info = core.map.info_of(key.device);
  bytes = round_up(std::max<std::size_t>(bytes, 1), info.granularity);
  for (;;) {
    if (const auto found = arena.take(bytes)) {
      const RangeSet::Range range{found->address, bytes};
      if (!found->mapped) {
        return {&arena, range.begin, keeps_content(key.restore) ? arena.in_chunks(range) : std::vector{range}};
      }
      arena.add_allocation(range.begin, bytes);
      return {&arena, range.begin, {}};
    }
    lock.unlock();
    core.physical.reserve(arena, bytes, info);
    lock.lock();
  }
}

// Acquires the chunks of a placement. Throws with nothing acquired and its range free again.
std::vector<Chunk> acquire(Core& core, const Arena::Key& key, const Placement& placed, std::size_t bytes) {
  std::vector<Chunk> chunks;
  try {
    check_margin(core, key.device, bytes);
    Transaction transaction;
    for (const auto& range : placed.chunks) {
      chunks.push_back(core.physical.acquire(key, range.begin, range.bytes, transaction));
    }
    transaction.commit();
  } catch (...) {
    const Lock lock(core.map.mutex);
    placed.arena->reclaim(placed.address, bytes);
    core.orphans.withhold(core.map, *placed.arena, placed.address, bytes);
    throw;
  }
  return chunks;
}

}  // namespace

Saver::Saver(std::unique_ptr<Driver> driver, Settings settings)
    : core_(std::make_unique<Core>(std::move(driver), std::move(settings))) {}

Saver::~Saver() = default;

Address Saver::allocate(const Arena::Key& key, std::size_t bytes) {
  Core& core = *core_;
  core.check_usable();
  try {
    core.orphans.retry_unless_busy(core.map);
    const Placement placed = place(core, key, bytes);
    if (placed.chunks.empty()) return placed.address;
    const std::vector<Chunk> chunks = acquire(core, key, placed, bytes);
    const Lock lock(core.map.mutex);
    placed.arena->add_allocation(placed.address, bytes);
    for (const auto& chunk : chunks) placed.arena->add_chunk(chunk);
    return placed.address;
  } catch (Error& error) {
    throw error.with_tag(key.tag).with_device(key.device).with_bytes(bytes);
  }
}

void Saver::free(Address address) {
  Core& core = *core_;
  if (core.closed) return;
  core.check_process();
  Arena* arena = nullptr;
  std::vector<Chunk> chunks;
  bool had_backup = false;
  {
    const Lock lock(core.map.mutex);
    arena = core.map.arena_of(address);
    if (arena == nullptr || !arena->alive(address)) {
      throw Error(ErrorKind::configuration, "free of an address that is not a live allocation").with_address(address);
    }
    if (arena->defer_free(address)) return;
    const auto& blocks = arena->allocations().at(address).blocks;
    had_backup = std::any_of(blocks.begin(), blocks.end(), [](const Block& block) { return block.has_memory(); });
    chunks = core.forget(*arena, address);
  }
  core.physical.give_back(*arena, chunks);
  if (had_backup) core.backups.settle();
}

OperationResult Saver::release(const Tags& tags, const std::vector<RangeSet::Range>& dead,
                               const std::map<std::string, Restore>& overrides) {
  return memsaver::release(*core_, tags, dead, overrides);
}

OperationResult Saver::resume(const Tags& tags) { return memsaver::resume(*core_, tags); }

void Saver::reserve(const Tags& tags) { memsaver::reserve(*core_, tags); }

void Saver::give_back_reserved() noexcept {
  if (!ended()) memsaver::give_back_reserved(*core_);
}

void Saver::prepare_backup() {
  Core& core = *core_;
  core.check_usable();
  std::set<int> digesting;
  {
    const Lock lock(core.map.mutex);
    for (const Arena* const arena : core.map.select({})) {
      if (keeps_content(arena->key().restore)) digesting.insert(arena->key().device);
    }
  }
  for (const int device : digesting) {
    core.driver->prepare_digest(device);
    if (core.backups.packs() || core.backups.shared() != nullptr) core.driver->prepare_packing(device);
  }
  if (core.backups.packs()) expect_backups(core);
  std::map<HostPool*, std::size_t> wanted;
  {
    const Lock lock(core.map.mutex);
    for (const Arena* const arena : core.map.select({})) {
      const auto& key = arena->key();
      if (key.restore == Restore::host && !arena->busy()) {
        wanted[&core.backups.pool_of(key.device)] += arena->unprepared_bytes();
      }
    }
  }
  std::size_t shared = 0;
  for (const auto& [pool, bytes] : wanted) {
    if (core.backups.shared() == nullptr) pool->start_growth(bytes);
    shared += bytes;
  }
  if (core.backups.shared() != nullptr) core.backups.shared()->prepare_beyond(shared);
}

void Saver::wait_until_prepared() {
  Core& core = *core_;
  core.check_usable();
  std::string tags;
  {
    const Lock lock(core.map.mutex);
    for (const Arena* const arena : core.map.select({})) {
      if (arena->key().restore == Restore::host) tags += (tags.empty() ? "" : ", ") + arena->key().tag;
    }
  }
  try {
    for (HostPool* const pool : core.backups.pools()) pool->wait_for_growth();
    if (core.backups.shared() != nullptr) core.backups.shared()->wait_until_prepared();
  } catch (const Error& error) {
    Error named = error;  // other threads may wait for the same one
    throw named.with_tag(tags);
  }
}

void Saver::synchronize() {
  core_->check_usable();
  for (const int device : devices()) core_->driver->synchronize(device);
}

void Saver::trim_graph_memory() {
  core_->check_usable();
  for (const int device : devices()) core_->driver->trim_graph_memory(device);
}

BackupView Saver::backup_of(Address address, std::size_t bytes, void* to) {
  Core& core = *core_;
  core.check_process();
  const Lock operation(core.backups.operation_mutex);
  BackupView view;
  KeptContent content;
  {
    const Lock lock(core.map.mutex);
    const Arena* const arena = core.map.arena_of(address);
    const Allocation* const allocation = arena == nullptr ? nullptr : arena->allocation_around(address, bytes);
    if (allocation == nullptr) {
      throw Error(ErrorKind::configuration, "this is not memory of a region").with_address(address).with_bytes(bytes);
    }
    view.tag = arena->key().tag;
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
  core_->check_process();
  const Lock operation(core_->backups.operation_mutex);
  core_->drop_backups(tags);
  core_->backups.settle();
  if (!keep_memory) core_->backups.trim_later();
}

void Saver::trim_backup_memory(bool at_once) {
  core_->check_process();
  if (at_once) {
    for (HostPool* const pool : core_->backups.pools()) pool->trim();
  } else {
    const Lock operation(core_->backups.operation_mutex);
    core_->backups.trim_later();
  }
}

void Saver::set_file_folder(const std::string& folder) {
  core_->check_process();
  const Lock operation(core_->backups.operation_mutex);
  FileStore& files = core_->backups.files();
  if (files.move_to(folder)) return;
  core_->drop_backups({});
  if (files.move_to(folder)) return;
  throw Error(ErrorKind::configuration, "the folder for backup files cannot change while backups lie in the old one")
      .with_bytes(files.used_bytes())
      .with_advice("resume what is released first");
}

void Saver::set_memory_margin(std::size_t bytes) noexcept { core_->memory_margin = bytes; }

SaverStatus Saver::status() const {
  const Core& core = *core_;
  core.check_process();
  SaverStatus status;
  {
    const Lock lock(core.map.mutex);
    core.map.describe(status);
    status.pool = core.backups.pool_status();
    if (core.backups.shared() != nullptr) status.shared = core.backups.shared()->status();
    const std::size_t ready =
        core.backups.shared() == nullptr
            ? status.pool.capacity_bytes - status.pool.used_bytes
            : status.shared.pinned_bytes - std::min(status.shared.pinned_bytes, status.shared.held_bytes);
    status.prepared = ready >= core.map.unprepared_bytes();
  }
  status.reserved_by_device = core.reservation.bytes_by_device();
  status.file_bytes = core.backups.files().used_bytes();
  status.failure = core.driver->loss();
  if (!status.failure.empty()) status.state = "failed";
  const auto operation = core.progress.operation.load();
  if (operation == Progress::Operation::release) status.operation = "release";
  if (operation == Progress::Operation::resume) status.operation = "resume";
  status.done_bytes = core.progress.done_bytes;
  status.total_bytes = core.progress.total_bytes;
  status.copied_bytes = core.progress.copied_bytes;
  status.operation_seconds = core.progress.seconds();
  return status;
}

std::vector<std::string> Saver::known_tags() const {
  core_->check_process();
  return core_->map.tags();
}

std::vector<int> Saver::devices() const {
  core_->check_process();
  return core_->map.devices();
}

bool Saver::owns(Address address) const {
  core_->check_process();
  return core_->map.owns(address);
}

Driver& Saver::driver() { return *core_->driver; }

void Saver::check_usable() const { core_->check_usable(); }

void Saver::close() noexcept {
  core_->closed = true;
  if (getpid() != core_->process) return;  // a lock may be held by a thread of the parent
  core_->backups.end();
  core_->driver->end();
}

bool Saver::ended() const noexcept { return core_->closed || getpid() != core_->process; }

}  // namespace memsaver
