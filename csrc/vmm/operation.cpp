// The operations of a Saver; saver.hpp has their contracts.

#include <cmath>

#include "vmm/saver.hpp"

namespace memsaver {

namespace {

// A dead range smaller than this is copied with its neighbours: to copy 64 KiB takes about a microsecond, to start
// another copy several.
const std::size_t kSmallestGap = kSizeUnit / 16;
const std::size_t kFirstMemory = 64 * kSizeUnit;

// Returns the parts of a block that hold content: all but `dead`, which is in address order. `base` is the address of
// its allocation.
std::vector<Extent> live_extents(Address base, const Block& block, const std::vector<RangeSet::Range>& dead) {
  const Address begin = base + block.offset;
  const Address end = begin + block.bytes;
  RangeSet live;
  live.add(begin, block.bytes);
  auto range = std::partition_point(dead.begin(), dead.end(),
                                    [&](const auto& each) { return each.begin + each.bytes <= begin; });
  for (; range != dead.end() && range->begin < end; ++range) {
    const Address from = std::max(begin, range->begin);
    const Address to = std::min(end, range->begin + range->bytes);
    if (to - from >= kSmallestGap) live.remove(from, to - from);
  }
  std::vector<Extent> extents;
  for (const auto& [at, bytes] : live.ranges()) extents.push_back({at - base, bytes});
  return extents;
}

// Returns how many of the `needed` bytes are not owned yet.
std::size_t beyond(std::size_t needed, std::size_t owned) { return needed > owned ? needed - owned : 0; }

}  // namespace

// The base of release, resume, reserve and resize: plans with the map's lock held, runs without it. Owns the plan.
class Saver::Operation {
 public:
  Operation(Saver& saver, Progress::Operation kind) : saver_(saver), kind_(kind) {}
  Operation(const Operation&) = delete;
  virtual ~Operation() = default;

  // Waits for the operation under way, marks the arenas of `tags` busy and plans them all at the same instant, then
  // runs the plan. Throws as its Saver function; an error without tags and bytes gets those of the plan. Afterwards,
  // also when it throws, no arena is busy and deferred frees are done.
  OperationResult perform(const Tags& tags) {
    saver_.check_process();
    const Lock one_at_a_time(saver_.backups_.operation_mutex);
    saver_.check_usable();
    saver_.backups_.refuse_link();
    OperationResult result;
    {
      const Cleanup at_end([this] { end(); });
      try {
        saver_.physical_.retry(true);
        saver_.backups_.clean_up();
        saver_.check_usable();
        begin(tags);
        saver_.backups_.flush();
        run();
        saver_.check_usable();  // a failure that was only logged may have been the loss of the context
        result = this->result();
      } catch (Error& error) {
        Tags names = tags;
        for (const auto& [index, device] : devices_) {
          if (tags.empty()) names.push_back(device.tags());
        }
        error.with_tag(joined(names)).with_bytes(bytes());
        throw;
      }
    }
    result.seconds = seconds();
    return result;
  }

 protected:
  struct PlannedChunk {
    Arena* arena;
    Chunk chunk;  // resume: without a handle until it is acquired
    // How this resume, or the one after this release, restores its live ranges. None: only a resize brings them back.
    std::optional<Restore> restore;
  };

  static std::size_t bytes_of(const std::vector<PlannedChunk>& chunks) {
    std::size_t sum = 0;
    for (const auto& planned : chunks) sum += planned.chunk.bytes;
    return sum;
  }

  // What an operation does on one device.
  struct Work {
    int device = -1;
    std::vector<ContentBlock> blocks;                   // content to keep or restore
    std::vector<PlannedChunk> kept;                     // chunks under content
    std::vector<PlannedChunk> others;                   // chunks whose content is not kept
    std::vector<PlannedChunk> going;                    // chunks that a resize gives back
    std::map<std::string, std::size_t> released_bytes;  // by tag
    std::size_t freed_bytes = 0;
    double first_memory_seconds = 0;
    std::vector<PlannedChunk> acquired;
    Cleanup undo;
    PipelineSeconds seconds;

    // Sorts blocks, and the chunks under them, by address, as Pipeline expects them.
    void sort() {
      const auto by_address = [](const auto& a, const auto& b) { return a.chunk.address < b.chunk.address; };
      std::sort(kept.begin(), kept.end(), by_address);
      std::sort(blocks.begin(), blocks.end(), [](const auto& a, const auto& b) { return a.begin() < b.begin(); });
    }
    [[nodiscard]] std::vector<PlannedChunk> chunks() const {
      auto all = kept;
      all.insert(all.end(), others.begin(), others.end());
      return all;
    }
    // Returns the names of all tags, for errors.
    [[nodiscard]] std::string tags() const {
      std::set<std::string> names;
      for (const auto& planned : chunks()) names.insert(planned.arena->key().tag);
      for (const auto& planned : going) names.insert(planned.arena->key().tag);
      return joined({names.begin(), names.end()});
    }
    [[nodiscard]] std::size_t bytes() const { return bytes_of(chunks()) + bytes_of(going); }
  };

  // Adds the work of one arena to devices_.
  virtual void plan(Arena& arena) REQUIRES(saver_.backups_.operation_mutex, saver_.map_.mutex) = 0;
  virtual void run() REQUIRES(saver_.backups_.operation_mutex) = 0;

  // Returns the work of a device, made if there is none yet.
  [[nodiscard]] Work& on(int device) {
    Work& work = devices_[device];
    work.device = device;
    return work;
  }

  // Calls `work` for each of devices_, in parallel, and waits for all of them. Throws as sys::run_in_threads().
  void on_each_device(const std::function<void(Work&)>& work) {
    std::vector<Work*> devices;
    for (auto& [index, device] : devices_) devices.push_back(&device);
    sys::run_in_threads(devices.size(), [&](std::size_t i) {
      Work& device = *devices[i];
      try {
        work(device);
      } catch (Error& error) {
        error.with_tag(device.tags()).with_device(device.device).with_bytes(device.bytes());
        throw;
      }
    });
  }

  // Adds to devices_ the restore of `wanted`, ranges of an arena without memory.
  void plan_restore(Arena& arena, const RangeSet& wanted) REQUIRES(saver_.backups_.operation_mutex, saver_.map_.mutex) {
    if (wanted.ranges().empty()) return;
    Work& work = on(arena.key().device);
    bool kept = false;
    for (const auto& [base, block] : arena.blocks()) {
      if (block->kept == Kept::nothing || !wanted.contains(base + block->offset, block->bytes)) continue;
      kept = true;
      content_bytes_ += block->content_bytes();
      work.blocks.push_back({arena.key().tag, base, block, {}});
    }
    for (const auto& [begin, whole] : wanted.ranges()) {
      for (const auto& [at, bytes] : arena.in_chunks({begin, whole})) {
        const Restore fill = arena.comes_back_zero(at, bytes) ? Restore::zero : Restore::discard;
        (kept ? work.kept : work.others).push_back({&arena, {at, bytes, Handle{}}, fill});
      }
    }
  }

  // Throws out_of_device_memory if a device has too little free memory for the chunks to be mapped, or driver errors.
  // `to` is the verb of its message, `after` the state that it leaves.
  void check_room(const char* to, const std::string& after) {
    for (const auto& [index, device] : devices_) saver_.stacks_.raise(index, after);
    std::map<int, std::size_t> reserved;
    if (kind_ == Progress::Operation::resume) reserved = saver_.physical_.reserved_by_device();
    for (const auto& [index, device] : devices_) {
      const std::size_t chunks = bytes_of(device.chunks());
      const std::size_t needed = chunks - std::min(chunks, reserved[index]);
      const MemoryInfo memory = saver_.driver_->memory_info(index);
      if (needed <= memory.free_bytes) continue;
      throw Error(ErrorKind::out_of_device_memory, std::string("the device has too little free memory to ") + to)
          .with_device(index)
          .with_memory(needed, memory.free_bytes)
          .with_advice(after + "; let other processes free memory and repeat");
    }
  }

  // Carries out what plan_restore() planned; if `map_first`, maps everything before any content moves. Throws as
  // resume(): all of it is released with its backups.
  void restore(bool map_first) REQUIRES(saver_.backups_.operation_mutex) {
    for (auto& [index, device] : devices_) device.sort();
    saver_.progress_.begin(kind_, content_bytes_);
    // On failure, undo while the arenas are still busy: no other call may take the ranges meanwhile.
    const Cleanup undo_all([this] {
      for (auto& [index, device] : devices_) device.undo.run();
    });
    on_each_device([&](Work& device) REQUIRES(saver_.backups_.operation_mutex) { restore(device, map_first); });
    const Lock lock(saver_.map_.mutex);
    for (auto& [index, device] : devices_) {
      for (const auto& planned : device.acquired) planned.arena->add_chunk(planned.chunk);
      device.undo.dismiss();
    }
  }

  // Gives `chunks` back. Throws as PhysicalMemory::drop().
  void drop(Work& device, const std::vector<PlannedChunk>& chunks) EXCLUDES(saver_.map_.mutex) {
    const Stopwatch watch(device.seconds.driver);
    for (const auto& planned : chunks) drop(device, planned);
  }
  void drop(Work& device, const PlannedChunk& planned) EXCLUDES(saver_.map_.mutex) {
    saver_.physical_.drop(*planned.arena, planned.chunk, planned.restore);
    device.released_bytes[planned.arena->key().tag] += planned.chunk.bytes;
    if (device.freed_bytes < kFirstMemory) device.first_memory_seconds = seconds();
    device.freed_bytes += planned.chunk.bytes;
  }

  // Maps and restores those of `chunks` of each device that an operation that failed has dropped. If this fails, too,
  // logs `what` and the error.
  void undo(const char* what, std::vector<PlannedChunk> Work::* chunks) REQUIRES(saver_.backups_.operation_mutex)
      EXCLUDES(saver_.map_.mutex) {
    if (!saver_.driver_->loss().empty()) return;
    auto planned = std::exchange(devices_, {});
    const Cleanup at_end([&] { devices_ = std::move(planned); });  // errors name the tags and bytes of the operation
    content_bytes_ = 0;
    const bool undone = attempt(what, [&]() REQUIRES(saver_.backups_.operation_mutex) {
      {
        const Lock lock(saver_.map_.mutex);
        for (Arena* const arena : arenas_) {
          const auto device = planned.find(arena->key().device);
          if (device != planned.end()) plan_restore(*arena, lost_of(*arena, device->second.*chunks));
        }
      }
      restore(false);
    });
    if (undone) return;
    // give_up_damaged() drops only backups whose damage a resume has reported. This damage was not reported.
    for (auto& [index, device] : devices_) {
      for (const auto& content : device.blocks) content.block->damaged = false;
    }
  }

  [[nodiscard]] double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  [[nodiscard]] std::size_t bytes() const {
    std::size_t sum = 0;
    for (const auto& [index, device] : devices_) sum += device.bytes();
    return sum;
  }

  Saver& saver_;
  const Progress::Operation kind_;
  VerifyChoice verify_ = saver_.backups_.verify();
  std::vector<Arena*> arenas_;     // busy with this operation
  std::map<int, Work> devices_;    // those with something to do
  std::size_t content_bytes_ = 0;  // to keep or restore

 private:
  // Returns the live addresses of an arena that lie in `chunks` and have no memory.
  [[nodiscard]] static RangeSet lost_of(const Arena& arena, const std::vector<PlannedChunk>& chunks) {
    RangeSet lost = arena.released();
    for (const auto& [begin, bytes] : arena.shrunk().ranges()) lost.add(begin, bytes);
    RangeSet parts;
    for (const auto& [owner, chunk, restore] : chunks) {
      if (owner != &arena) continue;
      for (const auto& part : lost.remove(chunk.address, chunk.bytes)) parts.add(part.begin, part.bytes);
    }
    return parts;
  }

  // Maps the chunks of one device and restores their content. Throws as resume(): `device.undo` undoes it.
  void restore(Work& device, bool map_first) REQUIRES(saver_.backups_.operation_mutex) EXCLUDES(saver_.map_.mutex) {
    const auto chunks = device.chunks();
    if (chunks.empty()) return;
    std::vector<ChunkRange> ranges;
    for (const auto& [arena, chunk, fill] : chunks) {
      ranges.push_back({arena->key().tag, chunk.address, chunk.bytes, fill == Restore::zero});
    }
    const auto acquire = [&](std::size_t i) {
      const auto& [arena, chunk, fill] = chunks[i];
      std::optional<Handle> reserved;
      if (kind_ == Progress::Operation::resume) {
        reserved = saver_.physical_.take_reserved(device.device, chunk.bytes);
      }
      const Chunk acquired = saver_.physical_.acquire(arena->key(), chunk.address, chunk.bytes, device.undo, reserved);
      device.acquired.push_back({arena, acquired, fill});
    };
    for (std::size_t i = 0; map_first && i < ranges.size(); ++i) acquire(i);
    const auto acquire_next = [&](std::size_t i) {
      if (!map_first) acquire(i);
    };
    Pipeline& pipeline = saver_.backups_.pipeline_of(device.device);
    device.seconds = pipeline.restore(device.blocks, ranges, acquire_next, verify_);
  }

  void begin(const Tags& tags) REQUIRES(saver_.backups_.operation_mutex) {
    const Lock lock(saver_.map_.mutex);
    const std::vector<Arena*> selected = saver_.map_.select(tags);
    for (const Arena* const arena : selected) saver_.physical_.check_none_mapped(saver_.map_, *arena);
    saver_.map_.set_operation(kind_);
    for (Arena* const arena : selected) {
      arenas_.push_back(arena);
      policies_before_.push_back(arena->release_policies());
      arena->begin_operation();
      plan(*arena);
    }
  }

  void end() {
    saver_.progress_.end();
    std::vector<std::pair<Arena*, std::vector<Chunk>>> freed;
    {
      const Lock lock(saver_.map_.mutex);
      for (Arena* const arena : arenas_) {
        for (const Address address : arena->end_operation()) freed.emplace_back(arena, saver_.remove(*arena, address));
      }
    }
    for (const auto& [arena, chunks] : freed) saver_.physical_.give_back(*arena, chunks);
    saver_.backups_.flush();
    saver_.backups_.lend_link(saver_.map_.devices(), [&saver = saver_] { return saver.idle(); });
  }

  [[nodiscard]] OperationResult result() const EXCLUDES(saver_.map_.mutex) {
    const bool releasing = kind_ == Progress::Operation::release;
    OperationResult result;
    std::map<std::string, TagOutcome> tags;
    const Lock lock(saver_.map_.mutex);
    for (std::size_t i = 0; i < arenas_.size(); ++i) {
      const Arena* const arena = arenas_[i];
      TagOutcome& outcome = tags[arena->key().tag];
      outcome.tag = arena->key().tag;
      const std::set<Restore> policies = releasing ? arena->release_policies() : policies_before_[i];
      const std::string restore =
          policies.size() > 1 ? "mixed" : name_of(policies.empty() ? arena->key().restore : *policies.begin());
      if (outcome.bytes == 0) outcome.restore = restore;
      if (arena->live_bytes() > 0 && outcome.restore != restore) outcome.restore = "mixed";
      outcome.bytes += arena->live_bytes();
      if (arena->released().total_bytes() != 0) outcome.state = "released";
    }
    for (const auto& [index, device] : devices_) {
      result.first_memory_seconds = std::max(result.first_memory_seconds, device.first_memory_seconds);
      result.work.raise_to(device.seconds);
      for (const auto& [tag, bytes] : device.released_bytes) tags[tag].released_bytes += bytes;
      for (const auto& [arena, chunk, restore] : device.acquired) {
        tags[arena->key().tag].resumed_bytes += chunk.bytes;
      }
      for (const auto& content : device.blocks) {
        TagOutcome& outcome = tags[content.tag];
        const std::size_t bytes = content.block->content_bytes();
        using Outcome = ContentBlock::Outcome;
        if (content.outcome == Outcome::copied) (releasing ? outcome.backed_up_bytes : outcome.restored_bytes) += bytes;
        if (releasing && content.outcome == Outcome::copied) outcome.kept_bytes += content.block->kept_bytes();
        if (content.outcome == Outcome::found) outcome.shared_bytes += bytes;
        if (content.outcome == Outcome::unchanged) outcome.unchanged_bytes += bytes;
        if (content.outcome == Outcome::zero) outcome.zero_bytes += bytes;
      }
    }
    for (auto& [tag, outcome] : tags) {
      if (outcome.state.empty()) outcome.state = "resident";
      outcome.already = outcome.released_bytes == 0 && outcome.resumed_bytes == 0;
      result.tags.push_back(std::move(outcome));
    }
    return result;
  }

  std::vector<std::set<Restore>> policies_before_;  // under which each of arenas_ was released before the operation
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

class Saver::Release final : public Operation {
 public:
  // Without `drops` content is saved, and nothing else happens.
  Release(Saver& saver, const std::vector<RangeSet::Range>& dead, const std::map<std::string, Restore>& overrides,
          bool drops = true)
      : Operation(saver, Progress::Operation::release), dead_(dead), overrides_(overrides), drops_(drops) {}

 private:
  void plan(Arena& arena) REQUIRES(saver_.backups_.operation_mutex, saver_.map_.mutex) override {
    if (arena.chunks().empty()) return;
    const int device = arena.key().device;
    const auto changed = overrides_.find(arena.key().tag);
    const Restore restore = changed != overrides_.end() ? changed->second : arena.key().restore;
    if (!drops_ && !keeps_content(restore)) return;
    Work& work = on(device);
    for (const auto& [address, chunk] : arena.chunks()) {
      (keeps_content(restore) ? work.kept : work.others).push_back({&arena, chunk, restore});
    }
    if (keeps_content(restore)) arena.make_blocks();
    for (const auto& [base, block] : arena.blocks()) {
      if (!arena.is_mapped(base + block->offset, block->bytes)) continue;
      if (keeps_content(restore)) {
        plan_backup(arena, restore, base, *block, work);
      } else {
        saver_.backups_.give_back(*block, device);  // a backup older than the resident content is stale
      }
    }
  }

  void plan_backup(const Arena& arena, Restore restore, Address base, Block& block, Work& work)
      REQUIRES(saver_.map_.mutex) {
    const auto extents = block.adopted ? block.extents : live_extents(base, block, dead_);
    const std::size_t live = sum_of(extents);
    const bool to_file = restore == Restore::file;
    content_bytes_ += live;
    if (to_file) {
      file_bytes_ += beyond(block.expected_for(live), block.file.bytes);
    } else if (saver_.backups_.shared() != nullptr) {
      // Unknown before it is saved: other processes may have this content.
    } else if (const std::size_t bytes = beyond(block.expected_for(live), sum_of(block.host))) {
      host_bytes_[&saver_.backups_.pool_of(work.device)] += bytes;
    }
    work.blocks.push_back({arena.key().tag, base, &block, extents, to_file});
  }

  void run() REQUIRES(saver_.backups_.operation_mutex) override {
    for (auto& [pool, bytes] : host_bytes_) pool->check(bytes);
    if (file_bytes_ > 0) saver_.backups_.files().check(file_bytes_);
    give_up_damaged();
    Cleanup at_end;
    for (const auto& [pool, bytes] : host_bytes_) {
      pool->add_urgent(1);
      at_end.add([pool = pool] { pool->add_urgent(-1); });
      pool->start_growth(bytes);
    }
    saver_.progress_.begin(kind_, content_bytes_);
    for (auto& [index, device] : devices_) {
      saver_.driver_->synchronize(index);
      device.sort();
    }
    try {
      drop_all();
    } catch (const Error&) {
      // Undo it, unless content that is not kept is already gone. What stays released keeps its backups.
      if (!lost_content()) undo("a release failed, and what it had released stays so until it is resumed", &Work::kept);
      throw;
    }
    if (drops_) saver_.stacks_.lower();
    saver_.backups_.prepare_packing_later();
    const Lock lock(saver_.map_.mutex);
    if (saver_.map_.unprepared_bytes() == 0) saver_.backups_.trim_excess();
  }

  void drop_all() REQUIRES(saver_.backups_.operation_mutex) {
    on_each_device([&](Work& device) REQUIRES(saver_.backups_.operation_mutex) {
      if (device.kept.empty()) return;
      std::vector<ChunkRange> ranges;
      for (const auto& planned : drops_ ? device.kept : std::vector<PlannedChunk>()) {
        ranges.push_back({planned.arena->key().tag, planned.chunk.address, planned.chunk.bytes});
      }
      const auto drop_kept = [&](std::size_t i) { drop(device, device.kept[i]); };
      device.seconds = saver_.backups_.pipeline_of(device.device).save(device.blocks, ranges, drop_kept);
    });
    // Content that is not kept goes last, on every device: until some of it is gone, everything can be undone.
    on_each_device([&](Work& device) { drop(device, device.others); });
  }

  // Returns whether some content that is not kept is gone.
  [[nodiscard]] bool lost_content() const EXCLUDES(saver_.map_.mutex) {
    const Lock lock(saver_.map_.mutex);
    bool lost = false;
    for (const auto& [index, device] : devices_) {
      for (const auto& [arena, chunk, restore] : device.others) lost |= !arena->is_mapped(chunk.address, chunk.bytes);
    }
    return lost;
  }

  // Drops the backups of released content that a resume could not restore, if this release overrides its policy with
  // discard or zero; otherwise the tag would stay released for ever. Intact backups stay, whatever the override.
  void give_up_damaged() EXCLUDES(saver_.map_.mutex) {
    const Lock lock(saver_.map_.mutex);
    for (Arena* const arena : arenas_) {
      const auto changed = overrides_.find(arena->key().tag);
      if (changed == overrides_.end() || keeps_content(changed->second)) continue;
      const auto blocks = arena->blocks();
      if (std::none_of(blocks.begin(), blocks.end(), [](const auto& each) { return each.second->damaged; })) continue;
      saver_.drop_backups_if(*arena, [arena](Address at, std::size_t size) { return !arena->is_mapped(at, size); });
      arena->set_released_under(changed->second);
    }
  }

  const std::vector<RangeSet::Range>& dead_;
  const std::map<std::string, Restore>& overrides_;
  const bool drops_;
  // What the backups need beyond what their blocks own.
  std::map<HostPool*, std::size_t> host_bytes_;
  std::size_t file_bytes_ = 0;
};

class Saver::Resume : public Operation {
 public:
  explicit Resume(Saver& saver, bool verify_all = false) : Operation(saver, Progress::Operation::resume) {
    if (verify_all) verify_ = VerifyChoice::full;
  }

 protected:
  void plan(Arena& arena) REQUIRES(saver_.backups_.operation_mutex, saver_.map_.mutex) override {
    plan_restore(arena, arena.released());
  }

  void run() REQUIRES(saver_.backups_.operation_mutex) override {
    const Cleanup unused([this] { saver_.give_back_reserved(); });
    check_room("resume", "everything stays released with its backup");
    // With little host memory all chunks are mapped first, so that memory for transfers cannot take what they need.
    restore(saver_.driver_->in_host_memory() && saver_.backups_.short_of_room(bytes()));
    if (!devices_.empty()) saver_.backups_.retain();
  }
};

class Saver::Reserve final : public Resume {
 public:
  using Resume::Resume;

 private:
  void run() REQUIRES(saver_.backups_.operation_mutex) override {
    saver_.physical_.give_back_reserved();
    Cleanup undo([this] { saver_.give_back_reserved(); });
    check_room("resume", "everything stays released with its backup");
    for (const auto& [index, device] : devices_) {
      for (const auto& [arena, chunk, fill] : device.chunks()) saver_.physical_.reserve(arena->key(), chunk.bytes);
    }
    undo.dismiss();
  }
};

// Grows first, so that what fails for lack of memory has changed nothing, and then shrinks.
class Saver::Resize final : public Operation {
 public:
  Resize(Saver& saver, const std::vector<RangeSet::Range>& unused, double kept)
      : Operation(saver, Progress::Operation::none), unused_(unused), kept_(kept) {}

 private:
  void plan(Arena& arena) REQUIRES(saver_.backups_.operation_mutex, saver_.map_.mutex) override {
    for (const auto& [address, allocation] : arena.allocations()) live_.add(address, allocation.bytes);
    if (arena.released().total_bytes() != 0) {
      if (arena.chunks().empty()) return;  // nothing moves: run() divides it anew
      throw Error(ErrorKind::configuration, "memory that is released in part cannot be resized")
          .with_advice("resume the tag first; nothing was changed");
    }
    const RangeSet used = used_of(arena);
    Work& work = on(arena.key().device);
    for (const auto& [address, chunk] : arena.chunks()) {
      if (!used.overlaps(address, chunk.bytes)) work.going.push_back({&arena, chunk, std::nullopt});
    }
    RangeSet coming;
    for (const auto& [begin, bytes] : arena.shrunk().ranges()) {
      for (const auto& piece : arena.in_chunks({begin, bytes})) {
        if (used.overlaps(piece.begin, piece.bytes)) coming.add(piece.begin, piece.bytes);
      }
    }
    plan_restore(arena, coming);
  }

  // Returns the live addresses of an arena that are not unused.
  [[nodiscard]] RangeSet used_of(const Arena& arena) const {
    RangeSet used;
    for (const auto& [address, allocation] : arena.allocations()) {
      used.add(address, std::min(allocation.bytes,
                                 static_cast<std::size_t>(std::ceil(static_cast<double>(allocation.bytes) * kept_))));
    }
    for (const auto& [begin, bytes] : unused_) used.remove(begin, bytes);
    return used;
  }

  void run() REQUIRES(saver_.backups_.operation_mutex) override {
    for (const auto& [begin, bytes] : unused_) {
      if (bytes == 0 || live_.overlaps(begin, bytes)) continue;
      throw Error(ErrorKind::configuration, "unused memory is not in a region of the tag")
          .with_advice("allocate it in one; nothing was changed");
    }
    check_room("grow", "everything is as before");
    restore(false);
    try {
      forget_backups();
      for (auto& [index, device] : devices_) {
        if (!device.going.empty()) saver_.driver_->synchronize(index);
      }
      on_each_device([&](Work& device) { drop(device, device.going); });
    } catch (const Error&) {
      shrink_again();
      undo("a resize failed, and what it had given back stays so until the next one", &Work::going);
      throw;
    }
    const Lock lock(saver_.map_.mutex);
    for (Arena* const arena : arenas_) {
      if (arena->released().total_bytes() != 0) divide(*arena);
    }
  }

  // Marks which ranges of an arena without memory the next resume maps, and which only a resize does.
  void divide(Arena& arena) REQUIRES(saver_.backups_.operation_mutex, saver_.map_.mutex) {
    const RangeSet used = used_of(arena);
    RangeSet unused;
    for (const auto& [address, allocation] : arena.allocations()) {
      for (const auto& piece : arena.in_chunks({address, allocation.bytes})) {
        if (!used.overlaps(piece.begin, piece.bytes)) unused.add(piece.begin, piece.bytes);
      }
    }
    saver_.drop_backups_if(arena, [&](Address at, std::size_t bytes) { return unused.overlaps(at, bytes); });
    arena.set_shrunk(unused);
  }

  // Drops the backups of the chunks to be given back: these come back with zeros.
  void forget_backups() REQUIRES(saver_.backups_.operation_mutex) EXCLUDES(saver_.map_.mutex) {
    const Lock lock(saver_.map_.mutex);
    RangeSet going;
    for (const auto& [index, device] : devices_) {
      for (const auto& [arena, chunk, restore] : device.going) going.add(chunk.address, chunk.bytes);
    }
    for (Arena* const arena : arenas_) {
      saver_.drop_backups_if(*arena, [&](Address at, std::size_t bytes) { return going.overlaps(at, bytes); });
    }
  }

  // Drops the chunks that were brought back.
  void shrink_again() {
    if (!saver_.driver_->loss().empty()) return;
    attempt("a resize failed, and what it had brought back stays", [this] {
      for (const auto& [index, device] : devices_) {
        for (const auto& [arena, chunk, restore] : device.acquired) {
          saver_.physical_.drop(*arena, chunk, std::nullopt);
        }
      }
    });
  }

  const std::vector<RangeSet::Range>& unused_;
  RangeSet live_;  // all of the tag's
  const double kept_;
};

// Estimates, by samples, the size of backups that resident content of policy `host` does not have yet. Moves nothing.
class Saver::Expectation final : public Operation {
 public:
  explicit Expectation(Saver& saver) : Operation(saver, Progress::Operation::none) {}

 private:
  void plan(Arena& arena) REQUIRES(saver_.backups_.operation_mutex, saver_.map_.mutex) override {
    if (arena.key().restore != Restore::host || arena.chunks().empty()) return;
    arena.make_blocks();
    Work& work = on(arena.key().device);
    for (const auto& [address, chunk] : arena.chunks()) work.kept.push_back({&arena, chunk, Restore::host});
    for (const auto& [base, block] : arena.blocks()) {
      if (!arena.is_mapped(base + block->offset, block->bytes)) continue;
      work.blocks.push_back({arena.key().tag, base, block, {{block->offset, block->bytes}}});
    }
  }

  void run() REQUIRES(saver_.backups_.operation_mutex) override {
    for (auto& [index, device] : devices_) {
      device.sort();
      saver_.backups_.pipeline_of(index).expect(device.blocks);
    }
  }
};

OperationResult Saver::release(const Tags& tags, const std::vector<RangeSet::Range>& dead,
                               const std::map<std::string, Restore>& overrides) {
  return Release(*this, dead, overrides).perform(tags);
}

OperationResult Saver::save(const Tags& tags, const std::vector<RangeSet::Range>& dead) {
  return Release(*this, dead, {}, false).perform(tags);
}

OperationResult Saver::resume(const Tags& tags, bool verify_all) { return Resume(*this, verify_all).perform(tags); }

OperationResult Saver::resize(const std::string& tag, const std::vector<RangeSet::Range>& unused, double kept) {
  return Resize(*this, unused, kept).perform({tag});
}

void Saver::reserve(const Tags& tags) { (void)Reserve(*this).perform(tags); }

void Saver::give_back_reserved() noexcept {
  if (ended()) return;
  physical_.give_back_reserved();
  stacks_.lower();
}

void Saver::expect_backups() {
  attempt_unless_lost("host memory is prepared for content as it is", [this] { (void)Expectation(*this).perform({}); });
}

}  // namespace memsaver
