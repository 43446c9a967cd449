#include <algorithm>
#include <chrono>
#include <deque>
#include <future>
#include <limits>
#include <optional>
#include <utility>

#include "backup/digest_windows.hpp"
#include "backup/file_writes.hpp"
#include "backup/pipeline.hpp"
#include "backup/raw_first.hpp"
#include "backup/save_batch.hpp"
#include "backup/shared_save.hpp"
#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/scope_exit.hpp"
#include "support/sizes.hpp"

namespace memsaver {

namespace {

// One Pipeline::save(): digests windows of blocks, copies what changed, and drops chunks whose content is saved.
class SaveTask {
 public:
  SaveTask(Staging& staging, Progress& progress, std::vector<ContentBlock>& blocks,
           const std::vector<ChunkRange>& chunks, const std::function<void(std::size_t)>& drop)
      : staging_(staging), progress_(progress), blocks_(blocks), chunks_(chunks), drop_(drop) {
    if (staging_.store() != nullptr) shared_.emplace(staging_, *staging_.store());
    for (const auto& content : blocks_) left_bytes_ += sum_of(content.live);
  }

  PipelineSeconds run() {
    windows_.begin();
    try {
      windows_.submit();
      while (!windows_.empty()) {
        windows_.submit();  // one window ahead: the device digests it while this thread saves the previous one
        save_window();
        while (!batches_.empty() && is_ready(batches_.front())) finish_oldest();
      }
      add_chunks_below(std::numeric_limits<Address>::max(), batches_.emplace_back());
      while (!batches_.empty()) finish_oldest();
      drop_saved(std::numeric_limits<std::size_t>::max());
      staging_.wait_for_streams();
      staging_.give_bounce(writes_.transfers());
      packing_.close();
      if (shared_) staging_.store()->tidy();
    } catch (...) {
      staging_.settle(writes_.transfers());
      for (const auto& batch : batches_) {
        if (batch.event) driver_.recycle(device_, *batch.event);
      }
      if (shared_) shared_->abandon();
      throw;
    }
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
      if (!is_kept(blocks_[i], digest)) changed.push_back({i, digest, packable});
    }
    if (changed.empty()) drop_saved(std::numeric_limits<std::size_t>::max());  // while the device digests
    save_changed(changed, plan_packing(changed), batch);
    const bool last = window.end == blocks_.size();
    add_chunks_below(last ? std::numeric_limits<Address>::max() : blocks_[window.end].begin(), batch);
    if (!batch.copied.empty()) batch.event = driver_.record(device_, staging_.copies());
  }

  // Whether a block needs no copy: its backup has its content, or it is all zeros. Otherwise it counts as not kept
  // until finish_oldest().
  bool is_kept(ContentBlock& content, const std::optional<Digest>& digest) {
    Block& block = *content.block;
    const std::size_t bytes = sum_of(content.live);
    left_bytes_ -= bytes;
    const Kept target = content.to_file ? Kept::file : Kept::host;
    block.damaged = false;
    if (digest && (block.kept == Kept::zero || block.kept == target) && block.has_digest &&
        block.extents == content.live && block.digest == *digest) {
      content.outcome = ContentBlock::Outcome::unchanged;
      progress_.done_bytes += bytes;
      return true;
    }
    block.kept = Kept::nothing;
    block.extents = content.live;
    block.has_digest = false;
    block.packed_bytes = 0;
    if (bytes != 0 && (!digest || digest->any != 0)) return false;
    give_memory(block);
    block.kept = Kept::zero;
    block.has_digest = digest.has_value();
    if (digest) block.digest = *digest;
    content.outcome = ContentBlock::Outcome::zero;
    progress_.done_bytes += bytes;
    return true;
  }

  // How to pack each block; takes device memory for it if some is to be.
  std::vector<PackPlan> plan_packing(const std::vector<ChangedBlock>& changed) {
    std::vector<PackPlan> plans(changed.size());
    std::vector<PackItem> items;
    for (const auto& each : changed) {
      if (each.may_be_packed) items.push_back(blocks_[each.block].first_run());
    }
    if (items.empty() || !packing_.packs()) return plans;
    std::vector<PackEstimate> found;
    {
      const Stopwatch watch(seconds_.digest);
      found = packing_.plan(items, staging_.kernels());
    }
    if (std::none_of(found.begin(), found.end(), [](const auto& each) { return each.plan.worth_it(); })) return plans;
    if (!make_room()) return plans;
    auto estimate = found.begin();
    for (std::size_t i = 0; i < changed.size(); ++i) {
      if (changed[i].may_be_packed) plans[i] = estimate++->plan;
    }
    return plans;
  }

  // Takes memory for packing once as much was dropped, less if there is too little and more later. May finish all
  // batches but the newest one for that. Nothing is being packed.
  bool make_room() {
    while (packing_.buffers() == 0 && dropped_bytes_ < Packing::kBytes && batches_.size() > 1) finish_oldest();
    if (packing_.buffers() == 0) drop_saved(Packing::kBytes);
    return packing_.open(dropped_bytes_);
  }

  void save_changed(const std::vector<ChangedBlock>& changed, const std::vector<PackPlan>& plans, SaveBatch& batch) {
    for (std::size_t i = 0; i < changed.size(); ++i) save_block(changed[i], plans[i], batch);
    while (!packs_.empty()) finish_pack(batch);
  }

  void save_block(const ChangedBlock& changed, const PackPlan& plan, SaveBatch& batch) {
    drop_saved(2 * kBlockBytes);
    const ContentBlock& content = blocks_[changed.block];
    try {
      if (is_shared(changed, plan, batch)) return;
      // What was awaited may come when there are no buffers any more.
      if (plan.worth_it() && packing_.buffers() > 0) {
        pack(changed, plan, batch);
      } else {
        copy(changed, content.base, content.live, 0, batch);
      }
    } catch (Error& error) {
      throw error.with_tag(content.tag).with_bytes(sum_of(content.live));
    }
  }

  // Whether another process has written this content to the shared store, or is writing it.
  bool is_shared(const ChangedBlock& changed, const PackPlan& plan, SaveBatch& batch) {
    const ContentBlock& content = blocks_[changed.block];
    if (!shared_ || content.to_file || !changed.digest) return false;
    Block& block = *content.block;
    give_memory(block);
    const auto found = shared_->find(block, *changed.digest, sum_of(content.live));
    if (found == SharedStore::Found::awaited) batch.awaited.emplace_back(changed, plan);
    if (found == SharedStore::Found::kept) {
      const auto outcome = ContentBlock::Outcome::found;
      batch.copied.push_back({changed.block, Kept::host, changed.digest, block.packed_bytes, outcome});
    }
    return found == SharedStore::Found::awaited || found == SharedStore::Found::kept;
  }

  // Looks again for what was awaited. What nobody writes any more, this process copies.
  void look_again(SaveBatch& batch) {
    for (const auto& [changed, plan] : std::exchange(batch.awaited, {})) save_block(changed, plan, batch);
    while (!packs_.empty()) finish_pack(batch);
    if (batch.event) driver_.recycle(device_, *std::exchange(batch.event, std::nullopt));
    batch.event = driver_.record(device_, staging_.copies());
  }

  // Two blocks are packed ahead of the copies; the other buffers are those that are being copied.
  void pack(const ChangedBlock& changed, const PackPlan& plan, SaveBatch& batch) {
    const std::size_t ahead = packing_.buffers() > 2 ? 2 : 1;
    while (packs_.size() >= ahead) finish_pack(batch);
    const PackItem content = blocks_[changed.block].first_run();
    Packing::Buffer& buffer = packing_.take();
    driver_.pack(device_, plan, content, {buffer.address, packed_limit(content.bytes)}, buffer.result,
                 staging_.kernels());
    packing_.use(buffer, staging_.kernels());
    packs_.push_back({changed, &buffer});
  }

  // Copies the oldest block that is being packed. If it did not become small enough, as it is.
  void finish_pack(SaveBatch& batch) {
    const auto [changed, buffer] = packs_.front();
    packs_.pop_front();
    {
      const Stopwatch watch(seconds_.copy);
      packing_.wait(*buffer);
    }
    const ContentBlock& content = blocks_[changed.block];
    const std::size_t packed_bytes = *buffer->result;
    if (packed_bytes == 0) return copy(changed, content.base, content.live, 0, batch);
    copy(changed, buffer->address, {{0, packed_bytes}}, packed_bytes, batch);
    packing_.use(*buffer, staging_.copies());
  }

  // Starts the copy of `extents` at `base`: those of a block, or what they were packed to.
  void copy(const ChangedBlock& changed, Address base, const std::vector<Extent>& extents, std::size_t packed_bytes,
            SaveBatch& batch) {
    const ContentBlock& content = blocks_[changed.block];
    if (content.to_file) {
      copy_to_file(*content.block, base, extents, batch);
    } else {
      copy_to_memory(*content.block, base, extents, packed_bytes);
    }
    batch.copied.push_back({changed.block, content.to_file ? Kept::file : Kept::host, changed.digest, packed_bytes,
                            ContentBlock::Outcome::copied});
  }

  // Packed content that changed may be a little larger or smaller: rounding lets it keep its memory.
  void copy_to_memory(Block& block, Address base, const std::vector<Extent>& extents, std::size_t packed_bytes) {
    std::size_t bytes = sum_of(extents);
    if (packed_bytes != 0) bytes = round_up(bytes, kBlockBytes / 128);
    {
      const Stopwatch watch(seconds_.host_memory);
      const bool taken = block.shared && shared_->take(block, bytes, left_bytes_);
      if (!taken && sum_of(block.host) != to_pages(bytes)) {
        give_memory(block);
        block.host = staging_.pool().take(bytes);
      }
    }
    staging_.copy(Staging::Direction::to_host, base, extents, block.host);
    if (block.shared) shared_->copied(block, packed_bytes);
  }

  void copy_to_file(Block& block, Address base, const std::vector<Extent>& extents, SaveBatch& batch) {
    const std::size_t bytes = sum_of(extents);
    if (block.file.bytes != to_pages(bytes)) {
      give_memory(block);
      block.file = staging_.files().take(to_pages(bytes));
    }
    batch.writes.push_back(writes_.start(block.file, base, extents));
  }

  void add_chunks_below(Address saved, SaveBatch& batch) {
    while (next_chunk_ < chunks_.size() && chunks_[next_chunk_].end() <= saved) batch.chunks.push_back(next_chunk_++);
  }

  bool is_ready(SaveBatch& batch) {
    if (batch.event && !driver_.done(device_, *batch.event)) return false;
    if (!batch.awaited.empty()) {
      look_again(batch);
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
        const std::uint32_t seen = shared_->changes();
        look_again(batch);
        if (!batch.awaited.empty()) shared_->wait_for_others(seen);
      }
      if (batch.event) {
        driver_.wait(device_, *batch.event);
        driver_.recycle(device_, *batch.event);
        batch.event.reset();
      }
      for (const auto& write : batch.writes) write.get();
      if (shared_) shared_->publish_done();
    }
    for (const auto& copied : batch.copied) {
      ContentBlock& content = blocks_[copied.block];
      content.block->kept = copied.kept;
      content.block->has_digest = copied.digest.has_value();
      content.block->digest = copied.digest.value_or(Digest{});
      content.block->packed_bytes = copied.packed_bytes;
      content.block->expected_bytes = copied.packed_bytes == 0 ? 0 : content.block->kept_bytes();
      content.outcome = copied.outcome;
      const std::size_t bytes = sum_of(content.live);
      progress_.done_bytes += bytes;
      if (copied.outcome == ContentBlock::Outcome::copied) progress_.copied_bytes += bytes;
    }
    saved_.insert(saved_.end(), batch.chunks.begin(), batch.chunks.end());
    batches_.pop_front();
  }

  // Drops saved chunks, at least `bytes` if there are as many. A few at a time: the driver takes as long to unmap a
  // window as the link takes for the copies that are queued, and would leave it idle.
  void drop_saved(std::size_t bytes) {
    const Stopwatch watch(seconds_.driver);
    for (std::size_t dropped = 0; dropped < bytes && !saved_.empty(); saved_.pop_front()) {
      drop_(saved_.front());
      dropped += chunks_[saved_.front()].bytes;
      dropped_bytes_ += chunks_[saved_.front()].bytes;
    }
  }

  void give_memory(Block& block) {
    give_host_memory(block, staging_.pool(), staging_.store());
    staging_.files().give(std::exchange(block.file, {}));
    staging_.files().punch_holes();  // on a full disk this may be the only free space
  }

  Staging& staging_;
  Driver& driver_ = staging_.driver();
  const int device_ = staging_.device();
  Packing& packing_ = staging_.packing();
  Progress& progress_;
  std::vector<ContentBlock>& blocks_;
  const std::vector<ChunkRange>& chunks_;
  const std::function<void(std::size_t)>& drop_;
  std::size_t left_bytes_ = 0;  // of blocks that are not saved
  std::size_t next_chunk_ = 0;
  std::deque<SaveBatch> batches_;
  std::deque<std::size_t> saved_;  // chunks to be dropped
  PipelineSeconds seconds_;
  DigestWindows windows_{staging_, blocks_, seconds_};
  std::optional<SharedSave> shared_;
  FileWrites writes_{staging_, seconds_};
  RawFirst raw_first_{blocks_};
  std::size_t dropped_bytes_ = 0;
  std::deque<PackedBlock> packs_;
};

}  // namespace

PipelineSeconds Pipeline::save(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                               const std::function<void(std::size_t)>& drop) {
  return SaveTask(staging_, progress_, blocks, chunks, drop).run();
}

}  // namespace memsaver
