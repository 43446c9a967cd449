#include <algorithm>
#include <chrono>
#include <deque>
#include <future>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "backup/file_writes.hpp"
#include "backup/pipeline.hpp"
#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/scope_exit.hpp"
#include "support/sizes.hpp"

namespace memsaver {

namespace {

// Windows grow: a small first one returns memory early (64 MiB cross a 55 GB/s link in 1.2 ms), large ones keep every
// multiprocessor busy.
constexpr std::size_t kFirstWindow = 64 * kSizeUnit;

// One Pipeline::save(): digests windows of blocks, copies what changed, and drops chunks whose content is saved.
class SaveTask {
 public:
  SaveTask(Staging& staging, Progress& progress, std::vector<ContentBlock>& blocks,
           const std::vector<ChunkRange>& chunks, const std::function<void(std::size_t)>& drop)
      : staging_(staging), progress_(progress), blocks_(blocks), chunks_(chunks), drop_(drop) {}

  PipelineSeconds run() {
    digesting_ = staging_.can_digest();
    try {
      submit_window();
      while (!submitted_.empty()) {
        submit_window();  // one window ahead: the device digests it while this thread saves the previous one
        save_window();
        while (!batches_.empty() && is_ready(batches_.front())) finish_oldest();
      }
      add_chunks_below(std::numeric_limits<Address>::max(), batches_.emplace_back());
      while (!batches_.empty()) finish_oldest();
      staging_.wait_for_streams();
      staging_.give_bounce(writes_.transfers());
      packing_.close();
    } catch (...) {
      staging_.settle(writes_.transfers());
      for (const auto& batch : batches_) {
        if (batch.event) driver_.recycle(device_, *batch.event);
      }
      throw;
    }
    return seconds_;
  }

 private:
  using Window = std::pair<std::size_t, std::size_t>;  // blocks [first, second)

  // Blocks whose copies end at one event, and the chunks that may be dropped then.
  struct Batch {
    struct Copied {
      std::size_t block;
      Kept kept;
      std::optional<Digest> digest;
      std::size_t packed_bytes;  // 0: not packed
    };
    std::vector<Copied> copied;
    std::vector<std::shared_future<void>> writes;
    std::optional<Event> event;
    std::vector<std::size_t> chunks;
  };

  // A block to be copied.
  struct Changed {
    std::size_t block;
    std::optional<Digest> digest;
    bool may_be_packed;
  };
  // A block that is being packed.
  struct Pack {
    Changed changed;
    Packing::Buffer* buffer;
  };

  // At least one block, and no more than a batch of digests holds.
  Window next_window() {
    const std::size_t begin = next_block_;
    std::size_t bytes = 0;
    std::size_t items = 0;
    for (; next_block_ < blocks_.size(); ++next_block_) {
      const auto& extents = blocks_[next_block_].live;
      bytes += sum_of(extents);
      items += DigestQueue::items_of(extents);
      if (next_block_ > begin && (bytes > window_bytes_ || items > DigestQueue::kSlotItems)) break;
    }
    window_bytes_ = std::min(2 * window_bytes_, kLargestWindow);
    return {begin, next_block_};
  }

  void submit_window() {
    if (next_block_ == blocks_.size()) return;
    const Window window = next_window();
    if (digesting_) {
      std::vector<DigestJob> jobs;
      for (std::size_t i = window.first; i < window.second; ++i) jobs.push_back({blocks_[i].base, &blocks_[i].live});
      staging_.digests().submit(jobs);
    }
    submitted_.push_back(window);
  }

  void save_window() {
    const Window window = submitted_.front();
    submitted_.pop_front();
    std::vector<Digest> digests;
    if (digesting_) {
      const Stopwatch watch(seconds_.digest);
      digests = staging_.digests().collect();
    }
    Batch& batch = batches_.emplace_back();
    std::vector<Changed> changed;
    for (std::size_t i = window.first; i < window.second; ++i) {
      const bool packable = may_be_packed(blocks_[i]);
      const auto digest = digesting_ ? std::optional(digests[i - window.first]) : std::nullopt;
      if (!is_kept(blocks_[i], digest)) changed.push_back({i, digest, packable});
    }
    save_changed(changed, plan_packing(changed), batch);
    const bool last = window.second == blocks_.size();
    add_chunks_below(last ? std::numeric_limits<Address>::max() : blocks_[window.second].begin(), batch);
    if (!batch.copied.empty()) batch.event = driver_.record(device_, staging_.copies());
  }

  // The first blocks of each tag stay as they are: on resume the memory for unpacking has its room where they will be.
  bool may_be_packed(const ContentBlock& content) {
    std::size_t& before = seen_bytes_[{content.tag, content.to_file}];
    const bool allowed =
        before >= Packing::kBytes && content.live.size() == 1 && content.live.front().bytes >= Packing::kSmallest;
    before += content.block->bytes;
    return allowed;
  }

  // Whether a block needs no copy: its backup has its content, or it is all zeros. Otherwise it counts as not kept
  // until finish_oldest().
  bool is_kept(ContentBlock& content, const std::optional<Digest>& digest) {
    Block& block = *content.block;
    const std::size_t bytes = sum_of(content.live);
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
  std::vector<PackPlan> plan_packing(const std::vector<Changed>& changed) {
    std::vector<PackPlan> plans(changed.size());
    std::vector<PackItem> items;
    for (const auto& each : changed) {
      if (each.may_be_packed) items.push_back(blocks_[each.block].first_run());
    }
    if (items.empty() || !packing_.ready()) return plans;
    std::vector<PackPlan> found;
    {
      const Stopwatch watch(seconds_.digest);
      found = packing_.plan(items, staging_.kernels());
    }
    if (std::none_of(found.begin(), found.end(), [](const auto& each) { return each.worth_it(); })) return plans;
    if (!make_room()) return plans;
    auto plan = found.begin();
    for (std::size_t i = 0; i < changed.size(); ++i) {
      if (changed[i].may_be_packed) plans[i] = *plan++;
    }
    return plans;
  }

  // Takes memory for packing once as much was dropped. May finish all batches but the newest one for that.
  bool make_room() {
    while (packing_.buffers() == 0 && dropped_bytes_ < Packing::kBytes && batches_.size() > 1) finish_oldest();
    return packing_.open(dropped_bytes_);
  }

  void save_changed(const std::vector<Changed>& changed, const std::vector<PackPlan>& plans, Batch& batch) {
    for (std::size_t i = 0; i < changed.size(); ++i) {
      const ContentBlock& content = blocks_[changed[i].block];
      try {
        if (plans[i].worth_it()) {
          pack(changed[i], plans[i], batch);
        } else {
          copy(changed[i], content.base, content.live, 0, batch);
        }
      } catch (Error& error) {
        throw error.with_tag(content.tag).with_bytes(sum_of(content.live));
      }
    }
    while (!packs_.empty()) finish_pack(batch);
  }

  // Two blocks are packed ahead of the copies; the other buffers are those that are being copied.
  void pack(const Changed& changed, const PackPlan& plan, Batch& batch) {
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
  void finish_pack(Batch& batch) {
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
  void copy(const Changed& changed, Address base, const std::vector<Extent>& extents, std::size_t packed_bytes,
            Batch& batch) {
    const ContentBlock& content = blocks_[changed.block];
    if (content.to_file) {
      copy_to_file(*content.block, base, extents, batch);
    } else {
      copy_to_memory(*content.block, base, extents, packed_bytes != 0);
    }
    batch.copied.push_back({changed.block, content.to_file ? Kept::file : Kept::host, changed.digest, packed_bytes});
  }

  // Packed content that changed may be a little larger or smaller: rounding lets it keep its memory.
  void copy_to_memory(Block& block, Address base, const std::vector<Extent>& extents, bool packed) {
    std::size_t bytes = sum_of(extents);
    if (packed) bytes = round_up(bytes, kBlockBytes / 128);
    if (sum_of(block.host) != to_pages(bytes)) {
      give_memory(block);
      const Stopwatch watch(seconds_.host_memory);
      block.host = staging_.pool().take(bytes);
    }
    staging_.copy(Staging::Direction::to_host, base, extents, block.host);
  }

  void copy_to_file(Block& block, Address base, const std::vector<Extent>& extents, Batch& batch) {
    const std::size_t bytes = sum_of(extents);
    if (block.file.bytes != to_pages(bytes)) {
      give_memory(block);
      block.file = staging_.files().take(to_pages(bytes));
    }
    batch.writes.push_back(writes_.start(block.file, base, extents));
  }

  void add_chunks_below(Address saved, Batch& batch) {
    while (next_chunk_ < chunks_.size() && chunks_[next_chunk_].end() <= saved) batch.chunks.push_back(next_chunk_++);
  }

  bool is_ready(const Batch& batch) {
    if (batch.event && !driver_.done(device_, *batch.event)) return false;
    return std::all_of(batch.writes.begin(), batch.writes.end(), [](const auto& write) {
      return write.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    });
  }

  void finish_oldest() {
    Batch& batch = batches_.front();
    {
      const Stopwatch watch(seconds_.copy);
      if (batch.event) {
        driver_.wait(device_, *batch.event);
        driver_.recycle(device_, *batch.event);
        batch.event.reset();
      }
      for (const auto& write : batch.writes) write.get();
    }
    for (const auto& copied : batch.copied) {
      ContentBlock& content = blocks_[copied.block];
      content.block->kept = copied.kept;
      content.block->has_digest = copied.digest.has_value();
      content.block->digest = copied.digest.value_or(Digest{});
      content.block->packed_bytes = copied.packed_bytes;
      content.outcome = ContentBlock::Outcome::copied;
      const std::size_t bytes = sum_of(content.live);
      progress_.done_bytes += bytes;
      progress_.copied_bytes += bytes;
    }
    {
      const Stopwatch watch(seconds_.driver);
      for (const std::size_t chunk : batch.chunks) {
        drop_(chunk);
        dropped_bytes_ += chunks_[chunk].bytes;
      }
    }
    batches_.pop_front();
  }

  void give_memory(Block& block) {
    staging_.pool().give(std::exchange(block.host, {}));
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
  bool digesting_ = false;
  std::size_t next_block_ = 0;  // of the next window
  std::size_t window_bytes_ = kFirstWindow;
  std::deque<Window> submitted_;
  std::size_t next_chunk_ = 0;
  std::deque<Batch> batches_;
  PipelineSeconds seconds_;
  FileWrites writes_{staging_, seconds_};
  std::map<std::pair<std::string, bool>, std::size_t> seen_bytes_;  // of blocks so far, by tag and kind of backup
  std::size_t dropped_bytes_ = 0;
  std::deque<Pack> packs_;
};

}  // namespace

PipelineSeconds Pipeline::save(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                               const std::function<void(std::size_t)>& drop) {
  return SaveTask(staging_, progress_, blocks, chunks, drop).run();
}

}  // namespace memsaver
