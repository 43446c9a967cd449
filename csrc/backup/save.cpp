#include <limits>

#include "backup/pipeline.hpp"
#include "support/crew.hpp"

namespace memsaver {

namespace {

// Owns the digests of a save's blocks, in windows: each is digested while the one before it is saved.
class DigestWindows {
 public:
  struct Window {
    std::size_t begin, end;                      // blocks
    std::vector<std::optional<Digest>> digests;  // of them; none if the device cannot digest
  };

  // Adds the seconds spent waiting for digests to `seconds`.
  DigestWindows(Pipeline& pipeline, const std::vector<ContentBlock>& blocks, PipelineSeconds& seconds)
      : blocks_(blocks), seconds_(seconds), digests_(pipeline.digests()) {}

  [[nodiscard]] bool empty() const { return submitted_.empty(); }
  // Starts to digest the next window, if there is one: at least one block. Throws driver errors.
  void submit() {
    if (next_ == blocks_.size()) return;
    Window window{next_, next_, {}};
    DigestQueue::Batch batch;
    const auto fits = [&](const ContentBlock& each) { return batch.add({each.base, &each.live}, bytes_); };
    while (window.end < blocks_.size() && fits(blocks_[window.end])) ++window.end;
    bytes_ = std::min(2 * bytes_, kLargestWindow);
    next_ = window.end;
    if (digests_ != nullptr) digests_->submit(batch.jobs());
    submitted_.push_back(std::move(window));
  }
  // Waits for the oldest window that was submitted, and returns it. Throws driver errors.
  [[nodiscard]] Window collect() {
    Window window = std::move(submitted_.front());
    submitted_.pop_front();
    window.digests.resize(window.end - window.begin);
    if (digests_ == nullptr) return window;
    const Stopwatch watch(seconds_.digest);
    const std::vector<Digest> digests = digests_->collect();
    window.digests.assign(digests.begin(), digests.end());
    return window;
  }

 private:
  // Windows grow: a small first one returns memory early (64 MiB cross a 55 GB/s link in 1.2 ms), large ones keep every
  // multiprocessor busy.
  inline static const std::size_t kFirstWindow = 64 * kSizeUnit;

  const std::vector<ContentBlock>& blocks_;
  PipelineSeconds& seconds_;
  DigestQueue* const digests_;
  std::size_t next_ = 0;  // block of the next window
  std::size_t bytes_ = kFirstWindow;
  std::deque<Window> submitted_;
};

// Owns up to kTransfers copies from a device to the backup file, each with bounce memory and a thread that writes.
class FileWrites {
 public:
  // Adds the seconds spent waiting to `seconds`.
  FileWrites(Pipeline& pipeline, PipelineSeconds& seconds) : pipeline_(pipeline), seconds_(seconds) {}

  // Starts to copy `extents` of the device memory at `base` to `range` of the file: as large, rounded up to pages. The
  // device is read until the copies that are queued now are done, the file written until the result is ready. Throws
  // out_of_host_memory, driver errors or what an earlier write threw: what is under way is among transfers().
  [[nodiscard]] std::shared_future<void> start(const Extent& range, Address base, const std::vector<Extent>& extents) {
    limit(kTransfers - 1);
    FileTransfer& transfer = transfers_.emplace_back();  // its memory stays until nothing is under way
    transfer.bounce = take_bounce(sum_of(extents));
    const std::vector<HostRange>& memory = transfer.bounce->ranges;
    pipeline_.copy(Pipeline::Direction::to_host, base, extents, memory, pipeline_.copies);
    const auto write = [&files = pipeline_.files, copied = pipeline_.record(pipeline_.copies), range, memory](auto) {
      copied->wait();
      files.write(range, memory);
    };
    return transfer.done = writers_.run(1, write);
  }
  [[nodiscard]] const FileTransfers& transfers() const { return transfers_; }

 private:
  // Returns bounce memory for the last of transfers_; waits for older ones if it is short. A single one always gets it.
  std::unique_ptr<HostPool::Bounce> take_bounce(std::size_t bytes) {
    const Stopwatch watch(seconds_.host_memory);
    for (;;) {
      const std::size_t count = transfers_.size();
      if (auto bounce = pipeline_.bounce(bytes, count == 1)) return bounce;
      limit(count - 1);
      if (transfers_.size() == count) transfers_.front().done.get();  // a failed one keeps its memory: throw its error
    }
  }

  // Waits for the oldest transfers until `count` are left. Failed ones stay, uncounted: copies to their memory may
  // still run.
  void limit(std::size_t count) {
    auto oldest = transfers_.begin();
    for (std::size_t failed = 0; transfers_.size() > failed + count;) {
      try {
        oldest->done.get();
        oldest = transfers_.erase(oldest);
      } catch (const std::exception&) {
        ++failed;
        ++oldest;
      }
    }
  }

  Pipeline& pipeline_;
  PipelineSeconds& seconds_;
  FileTransfers transfers_;
  Crew writers_{kTransfers};
};

// Owns what one save has claimed in the shared store and not published. If several processes save equal content at
// once, each writes a part: it claims no more than it is copying, takes what others have written, and waits for what
// they are writing. Functions throw out_of_host_memory, backup or driver errors: claims stay until abandon().
class SharedSave {
 public:
  SharedSave(Pipeline& pipeline, SharedStore& store) : pipeline_(pipeline), store_(store) {}

  // As SharedStore::find().
  [[nodiscard]] SharedStore::Found find(Block& block, const Digest& digest) {
    publish_done();
    while (claims_.size() >= kClaims) wait_for_a_copy();
    store_.apply_pending();
    const SharedStore::Found found = store_.find(block, digest, alone_);
    if (block.shared) waiting_since_.reset();
    if (found == SharedStore::Found::claimed) claims_.push_back({&block, {}});
    return found;
  }

  // As SharedStore::take(); `expected` bytes are still to be saved.
  [[nodiscard]] bool take(Block& block, std::size_t bytes, std::size_t expected) {
    const bool taken = store_.take(block, bytes, expected, pipeline_.pool.numa_node());
    if (!taken) claims_.remove_if([&](const auto& claim) { return claim.block == &block; });
    return taken;
  }

  // Notes that the copy of a claimed block is on the stream of copies.
  void copied(const Block& block, std::size_t packed_bytes) {
    for (auto& claim : claims_) {
      if (claim.block == &block) claim = {claim.block, pipeline_.record(pipeline_.copies), packed_bytes};
    }
  }

  // Lets other processes find what is copied by now.
  void publish_done() {
    for (auto claim = claims_.begin(); claim != claims_.end();) {
      claim = claim->copied && claim->copied->done() ? publish(claim) : std::next(claim);
    }
  }

  // Publishes all that this process copies, then waits until another one has changed something since `changes()` was
  // `seen`. After a second without progress, the rest of the save waits for no process.
  void wait_for_others(std::uint32_t seen) {
    while (!claims_.empty()) wait_for_a_copy();
    const auto now = std::chrono::steady_clock::now();
    if (!waiting_since_) waiting_since_ = now;
    alone_ = now - *waiting_since_ > SharedStore::kOthersTimeout;
    if (!alone_) store_.wait_for_change(seen);
  }

  // Gives up what was claimed and not published. Only while no copy is under way.
  void abandon() noexcept {
    for (const auto& claim : std::exchange(claims_, {})) {
      store_.give(*std::exchange(claim.block->shared, std::nullopt));
      claim.block->host.clear();
    }
  }

 private:
  // Enough copies of 0.4 ms to keep the link busy while this thread plans and unmaps; others can claim the rest.
  static constexpr std::size_t kClaims = 8;

  struct Claim {
    Block* block;
    Recorded copied;
    std::size_t packed_bytes = 0;
  };

  // Copies end in the order in which they were queued: waits for the first of them.
  void wait_for_a_copy() {
    const auto first = std::find_if(claims_.begin(), claims_.end(), [](const auto& claim) { return claim.copied; });
    if (first == claims_.end()) return;
    first->copied->wait();
    publish(first);
  }

  std::list<Claim>::iterator publish(std::list<Claim>::iterator claim) {
    store_.publish(*claim->block->shared, claim->packed_bytes);
    return claims_.erase(claim);
  }

  Pipeline& pipeline_;
  SharedStore& store_;
  std::list<Claim> claims_;  // not published
  bool alone_ = false;
  std::optional<std::chrono::steady_clock::time_point> waiting_since_;
};

// Decides which blocks of one save may be packed; called for each of them, in order. The first ones of each tag stay
// raw, that is not packed: a release packs in the memory that they leave, and a resume unpacks through it. They are at
// most an eighth of the tag, but never less than two buffers need.
class RawFirst {
 public:
  explicit RawFirst(const std::vector<ContentBlock>& blocks) {
    for (const auto& content : blocks) tags_[key(content)].bytes += content.block->bytes;
  }

  [[nodiscard]] bool may_be_packed(const ContentBlock& content) {
    Tag& tag = tags_[key(content)];
    const std::size_t raw = tag.bytes < 8 * Packing::kBytes ? kLeast : Packing::kBytes;
    const bool allowed =
        tag.seen_bytes >= raw && content.live.size() == 1 && content.live.front().bytes >= Packing::kSmallest;
    tag.seen_bytes += content.block->bytes;
    return allowed;
  }

 private:
  // As large as the first chunk of a tag and the first window of a save; at least two buffers of Packing.
  inline static const std::size_t kLeast = 64 * kSizeUnit;

  struct Tag {
    std::size_t bytes = 0;       // of all its blocks
    std::size_t seen_bytes = 0;  // of those decided so far
  };
  using Key = std::pair<std::string, bool>;  // the tag, and the kind of backup
  [[nodiscard]] static Key key(const ContentBlock& content) { return {content.tag, content.to_file}; }

  std::map<Key, Tag> tags_;
};

struct ChangedBlock {
  ContentBlock* content;
  std::optional<Digest> digest;
  bool may_be_packed;
  PackPlan plan{};
  std::size_t packed_bytes = 0;  // 0: not packed
  ContentBlock::Outcome outcome = ContentBlock::Outcome::copied;
};

// Blocks whose copies end at one event, and the chunks that may be dropped then.
struct SaveBatch {
  std::vector<ChangedBlock> copied;
  std::vector<ChangedBlock> awaited;  // another process is writing them
  std::vector<std::shared_future<void>> writes;
  Recorded event;
  std::vector<std::size_t> chunks;
};

// One Pipeline::save(): digests windows of blocks, copies what changed, and drops chunks whose content is saved.
class SaveTask {
 public:
  SaveTask(Pipeline& pipeline, std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
           const std::function<void(std::size_t)>& drop)
      : pipeline_(pipeline), blocks_(blocks), chunks_(chunks), drop_(drop) {
    if (pipeline_.store != nullptr) shared_.emplace(pipeline_, *pipeline_.store);
    for (const auto& content : blocks_) left_bytes_ += sum_of(content.live);
  }

  PipelineSeconds run() {
    Cleanup on_failure([this] {
      pipeline_.quiesce(writes_.transfers());
      if (shared_) shared_->abandon();
    });
    windows_.submit();
    while (!windows_.empty()) {
      windows_.submit();  // one window ahead: the device digests it while this thread saves the previous one
      save_window();
      while (!batches_.empty() && is_ready(batches_.front())) finish_oldest();
    }
    add_chunks_below(std::numeric_limits<Address>::max(), batches_.emplace_back());
    while (!batches_.empty()) finish_oldest();
    drop_saved(std::numeric_limits<std::size_t>::max());
    pipeline_.record(pipeline_.copies)->wait();
    pipeline_.record(pipeline_.kernels)->wait();
    packing_.close();
    if (shared_) pipeline_.store->tidy();
    on_failure.dismiss();
    return seconds_;
  }

 private:
  void save_window() {
    const DigestWindows::Window window = windows_.collect();
    SaveBatch& batch = batches_.emplace_back();
    std::vector<ChangedBlock> changed;
    for (std::size_t i = window.begin; i < window.end; ++i) {
      const bool packable = raw_first_.may_be_packed(blocks_[i]);
      const auto& digest = window.digests[i - window.begin];
      if (!is_kept(blocks_[i], digest)) changed.push_back({&blocks_[i], digest, packable});
    }
    if (changed.empty()) drop_saved(std::numeric_limits<std::size_t>::max());  // while the device digests
    plan_packing(changed);
    save_blocks(changed, batch);
    if (window.end < blocks_.size()) add_chunks_below(blocks_[window.end].begin(), batch);
    if (!batch.copied.empty()) batch.event = pipeline_.record(pipeline_.copies);
  }

  // Returns true if the backup has this content, or this is all zeros. Else there is no backup until finish_oldest().
  bool is_kept(ContentBlock& content, const std::optional<Digest>& digest) {
    Block& block = *content.block;
    const std::size_t bytes = sum_of(content.live);
    left_bytes_ -= bytes;
    const Kept target = content.to_file ? Kept::file : Kept::host;
    block.damaged = false;
    if (digest && (block.kept == Kept::zero || block.kept == target) && block.extents == content.live &&
        block.digest == digest) {
      content.outcome = ContentBlock::Outcome::unchanged;
      progress_.done_bytes += bytes;
      return true;
    }
    block.kept = Kept::nothing;
    block.extents = content.live;
    block.digest.reset();
    block.packed_bytes = 0;
    if (bytes != 0 && (!digest || digest->any != 0)) return false;
    give_memory(block);
    block.kept = Kept::zero;
    block.digest = digest;
    content.outcome = ContentBlock::Outcome::zero;
    progress_.done_bytes += bytes;
    return true;
  }

  // Plans how to pack each block; takes device memory for it if some is to be.
  void plan_packing(std::vector<ChangedBlock>& changed) {
    std::vector<PackItem> items;
    for (const auto& each : changed) {
      if (each.may_be_packed) items.push_back(each.content->first_run());
    }
    if (items.empty() || !packing_.packs()) return;
    std::vector<PackEstimate> found;
    {
      const Stopwatch watch(seconds_.digest);
      found = packing_.plan(items, pipeline_.kernels);
    }
    if (std::none_of(found.begin(), found.end(), [](const auto& each) { return each.plan.worth_it(); })) return;
    if (!make_room()) return;
    auto estimate = found.begin();
    for (auto& each : changed) {
      if (each.may_be_packed) each.plan = estimate++->plan;
    }
  }

  // Takes device memory for packing: no more than was dropped, unless this save drops nothing. Returns whether there is
  // any. May finish all batches but the newest, to drop more. Only while nothing is being packed.
  bool make_room() {
    while (packing_.buffers() == 0 && dropped_bytes_ < Packing::kBytes && batches_.size() > 1) finish_oldest();
    if (packing_.buffers() == 0) drop_saved(Packing::kBytes);
    return packing_.open(chunks_.empty() ? Packing::kBytes : dropped_bytes_);
  }

  void save_blocks(const std::vector<ChangedBlock>& blocks, SaveBatch& batch) {
    for (const auto& each : blocks) save_block(each, batch);
    while (!packs_.empty()) finish_pack(batch);
  }

  void save_block(const ChangedBlock& changed, SaveBatch& batch) {
    drop_saved(2 * kBlockBytes);
    const ContentBlock& content = *changed.content;
    try {
      if (is_shared(changed, batch)) return;
      // A block that was awaited may be saved here when there are no buffers any more.
      if (changed.plan.worth_it() && packing_.buffers() > 0) {
        pack(changed, batch);
      } else {
        copy(changed, content.base, content.live, batch);
      }
    } catch (Error& error) {
      throw error.with_tag(content.tag).with_bytes(sum_of(content.live));
    }
  }

  // Returns whether another process has written this content to the shared store, or is writing it.
  bool is_shared(ChangedBlock changed, SaveBatch& batch) {
    const ContentBlock& content = *changed.content;
    if (!shared_ || content.to_file || !changed.digest) return false;
    Block& block = *content.block;
    give_memory(block);
    const auto found = shared_->find(block, *changed.digest);
    if (found == SharedStore::Found::awaited) batch.awaited.push_back(changed);
    if (found == SharedStore::Found::kept) {
      changed.packed_bytes = block.packed_bytes;
      changed.outcome = ContentBlock::Outcome::found;
      batch.copied.push_back(changed);
    }
    return found == SharedStore::Found::awaited || found == SharedStore::Found::kept;
  }

  // Searches again for awaited content, and copies what no process is writing any more.
  void retry_awaited(SaveBatch& batch) {
    save_blocks(std::exchange(batch.awaited, {}), batch);
    batch.event = pipeline_.record(pipeline_.copies);
  }

  // Starts to pack a block. Two are packed ahead of the copies; what is in the other buffers is being copied.
  void pack(const ChangedBlock& changed, SaveBatch& batch) {
    const std::size_t ahead = packing_.buffers() > 2 ? 2 : 1;
    while (packs_.size() >= ahead) finish_pack(batch);
    const PackItem content = changed.content->first_run();
    Packing::Buffer& buffer = packing_.take();
    pipeline_.driver.pack(pipeline_.device, changed.plan, content, {buffer.address, packed_limit(content.bytes)},
                          buffer.result, pipeline_.kernels);
    packing_.use(buffer, pipeline_.kernels);
    packs_.emplace_back(changed, &buffer);
  }

  // Starts the copy of the oldest block that is being packed: raw, if it did not become small enough.
  void finish_pack(SaveBatch& batch) {
    auto [changed, buffer] = packs_.front();
    packs_.pop_front();
    {
      const Stopwatch watch(seconds_.copy);
      Packing::wait(*buffer);
    }
    changed.packed_bytes = *buffer->result;
    if (changed.packed_bytes == 0) return copy(changed, changed.content->base, changed.content->live, batch);
    copy(changed, buffer->address, {{0, changed.packed_bytes}}, batch);
    packing_.use(*buffer, pipeline_.copies);
  }

  // Starts the copy of `extents` at `base`: those of a block, or what they were packed to.
  void copy(const ChangedBlock& changed, Address base, const std::vector<Extent>& extents, SaveBatch& batch) {
    if (changed.content->to_file) {
      copy_to_file(*changed.content->block, base, extents, batch);
    } else {
      copy_to_memory(*changed.content->block, base, extents, changed.packed_bytes);
    }
    batch.copied.push_back(changed);
  }

  void copy_to_memory(Block& block, Address base, const std::vector<Extent>& extents, std::size_t packed_bytes) {
    std::size_t bytes = sum_of(extents);
    if (packed_bytes != 0) bytes = round_packed(bytes);
    {
      const Stopwatch watch(seconds_.host_memory);
      const bool taken = block.shared && shared_->take(block, bytes, left_bytes_);
      if (!taken && sum_of(block.host) != to_pages(bytes)) {
        give_memory(block);
        block.host = pipeline_.pool.take(bytes);
      }
    }
    pipeline_.copy(Pipeline::Direction::to_host, base, extents, block.host, pipeline_.copies);
    if (block.shared) shared_->copied(block, packed_bytes);
  }

  void copy_to_file(Block& block, Address base, const std::vector<Extent>& extents, SaveBatch& batch) {
    const std::size_t bytes = sum_of(extents);
    if (block.file.bytes != to_pages(bytes)) {
      give_memory(block);
      block.file = pipeline_.files.take(bytes);
    }
    batch.writes.push_back(writes_.start(block.file, base, extents));
  }

  void add_chunks_below(Address saved, SaveBatch& batch) {
    while (next_chunk_ < chunks_.size() && chunks_[next_chunk_].end() <= saved) batch.chunks.push_back(next_chunk_++);
  }

  bool is_ready(SaveBatch& batch) {
    if (batch.event && !batch.event->done()) return false;
    if (!batch.awaited.empty()) {
      retry_awaited(batch);
      return false;
    }
    return std::all_of(batch.writes.begin(), batch.writes.end(), [](const auto& write) {
      return write.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    });
  }

  void finish_oldest() {
    SaveBatch& batch = batches_.front();
    {
      const Stopwatch watch(seconds_.copy);
      while (!batch.awaited.empty()) {
        const std::uint32_t seen = pipeline_.store->changes();
        retry_awaited(batch);
        if (!batch.awaited.empty()) shared_->wait_for_others(seen);
      }
      if (batch.event) batch.event->wait();
      for (const auto& write : batch.writes) write.get();
      if (shared_) shared_->publish_done();
    }
    for (const auto& copied : batch.copied) {
      ContentBlock& content = *copied.content;
      Block& block = *content.block;
      block.kept = content.to_file ? Kept::file : Kept::host;
      block.digest = copied.digest;
      block.packed_bytes = copied.packed_bytes;
      block.expected_bytes = copied.packed_bytes == 0 ? 0 : block.kept_bytes();
      content.outcome = copied.outcome;
      const std::size_t bytes = sum_of(content.live);
      progress_.done_bytes += bytes;
      if (copied.outcome == ContentBlock::Outcome::copied) progress_.copied_bytes += bytes;
    }
    saved_.insert(saved_.end(), batch.chunks.begin(), batch.chunks.end());
    batches_.pop_front();
  }

  // Drops saved chunks, at least `bytes` if there are as many. Callers drop a few at a time: to unmap a whole window
  // takes as long as the copies that are queued, and would leave the link idle.
  void drop_saved(std::size_t bytes) {
    const Stopwatch watch(seconds_.driver);
    for (std::size_t dropped = 0; dropped < bytes && !saved_.empty(); saved_.pop_front()) {
      drop_(saved_.front());
      dropped += chunks_[saved_.front()].bytes;
      dropped_bytes_ += chunks_[saved_.front()].bytes;
    }
  }

  void give_memory(Block& block) {
    give_host_memory(block, pipeline_.pool, pipeline_.store);
    pipeline_.files.give(std::exchange(block.file, {}));
    pipeline_.files.punch_holes();  // on a full disk this may be the only free space
  }

  Pipeline& pipeline_;
  Packing& packing_ = pipeline_.packing;
  Progress& progress_ = pipeline_.progress;
  std::vector<ContentBlock>& blocks_;
  const std::vector<ChunkRange>& chunks_;
  const std::function<void(std::size_t)>& drop_;
  std::size_t left_bytes_ = 0;  // of blocks that are not saved
  std::size_t next_chunk_ = 0;
  std::deque<SaveBatch> batches_;
  std::deque<std::size_t> saved_;  // chunks to be dropped
  PipelineSeconds seconds_;
  DigestWindows windows_{pipeline_, blocks_, seconds_};
  std::optional<SharedSave> shared_;
  FileWrites writes_{pipeline_, seconds_};
  RawFirst raw_first_{blocks_};
  std::size_t dropped_bytes_ = 0;
  std::deque<std::pair<ChangedBlock, Packing::Buffer*>> packs_;  // being packed
};

}  // namespace

PipelineSeconds Pipeline::save(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                               const std::function<void(std::size_t)>& drop) {
  return SaveTask(*this, blocks, chunks, drop).run();
}

void Pipeline::expect(std::vector<ContentBlock>& blocks) {
  if (!packing.packs()) return;
  RawFirst raw_first(blocks);
  std::vector<PackItem> items;
  std::vector<Block*> sampled;
  for (const auto& content : blocks) {
    if (!raw_first.may_be_packed(content) || content.block->kept != Kept::nothing) continue;
    items.push_back(content.first_run());
    sampled.push_back(content.block);
  }
  Cleanup on_failure([this] { quiesce(); });
  const std::vector<PackEstimate> expected = packing.plan(items, kernels);
  for (std::size_t i = 0; i < sampled.size(); ++i) sampled[i]->expected_bytes = round_packed(expected[i].bytes);
  on_failure.dismiss();
}

}  // namespace memsaver
