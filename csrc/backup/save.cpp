#include <algorithm>
#include <chrono>
#include <deque>
#include <future>
#include <limits>
#include <optional>
#include <utility>

#include "backup/pipeline.hpp"
#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/scope_exit.hpp"
#include "support/system.hpp"

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
      staging_.give_bounce(transfers_);
    } catch (...) {
      staging_.settle(transfers_);
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
    };
    std::vector<Copied> copied;
    std::vector<std::shared_future<void>> writes;
    std::optional<Event> event;
    std::vector<std::size_t> chunks;
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
    for (std::size_t i = window.first; i < window.second; ++i) {
      save_block(i, digesting_ ? std::optional(digests[i - window.first]) : std::nullopt, batch);
    }
    const bool last = window.second == blocks_.size();
    add_chunks_below(last ? std::numeric_limits<Address>::max() : blocks_[window.second].begin(), batch);
    if (!batch.copied.empty()) batch.event = driver_.record(device_, staging_.copies());
  }

  // Decides how to keep a block, and starts its copy if it needs one. From then until finish_oldest() it counts as not
  // kept.
  void save_block(std::size_t index, const std::optional<Digest>& digest, Batch& batch) {
    ContentBlock& content = blocks_[index];
    Block& block = *content.block;
    const std::size_t bytes = sum_of(content.live);
    const Kept target = content.to_file ? Kept::file : Kept::host;
    block.damaged = false;
    if (digest && (block.kept == Kept::zero || block.kept == target) && block.has_digest &&
        block.extents == content.live && block.digest == *digest) {
      content.outcome = ContentBlock::Outcome::unchanged;
      progress_.done_bytes += bytes;
      return;
    }
    block.kept = Kept::nothing;
    block.extents = content.live;
    block.has_digest = false;
    if (bytes == 0 || (digest && digest->any == 0)) {
      give_memory(block);
      block.kept = Kept::zero;
      block.has_digest = digest.has_value();
      if (digest) block.digest = *digest;
      content.outcome = ContentBlock::Outcome::zero;
      progress_.done_bytes += bytes;
      return;
    }
    try {
      if (content.to_file) {
        copy_to_file(content, bytes, batch);
      } else {
        copy_to_memory(content, bytes);
      }
    } catch (Error& error) {
      throw error.with_tag(content.tag).with_bytes(bytes);
    }
    batch.copied.push_back({index, target, digest});
  }

  void copy_to_memory(const ContentBlock& content, std::size_t bytes) {
    Block& block = *content.block;
    if (sum_of(block.host) != to_pages(bytes)) {
      give_memory(block);
      const Stopwatch watch(seconds_.host_memory);
      block.host = staging_.pool().take(bytes);
    }
    staging_.copy(Staging::Direction::to_host, content.base, content.live, block.host);
  }

  void copy_to_file(const ContentBlock& content, std::size_t bytes, Batch& batch) {
    Block& block = *content.block;
    if (block.file.bytes != to_pages(bytes)) {
      give_memory(block);
      block.file = staging_.files().take(to_pages(bytes));
    }
    limit_transfers(kFileTransfers - 1);
    FileTransfer& transfer = transfers_.emplace_back();  // if anything below throws, settle() returns its memory
    transfer.bounce = take_bounce(bytes);
    staging_.copy(Staging::Direction::to_host, content.base, content.live, transfer.bounce);
    const Event copied = driver_.record(device_, staging_.copies());
    transfer.done = sys::run_beside([this, copied, range = block.file, memory = transfer.bounce] {
      const ScopeExit recycle([&] { driver_.recycle(device_, copied); });
      driver_.wait(device_, copied);
      staging_.files().write(range, memory);
    });
    batch.writes.push_back(transfer.done);
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
      content.outcome = ContentBlock::Outcome::copied;
      const std::size_t bytes = sum_of(content.live);
      progress_.done_bytes += bytes;
      progress_.copied_bytes += bytes;
    }
    {
      const Stopwatch watch(seconds_.driver);
      for (const std::size_t chunk : batch.chunks) drop_(chunk);
    }
    batches_.pop_front();
  }

  // Bounce memory for the last of transfers_. If there is too little for several at once, waits for the older ones; a
  // single transfer is always served.
  std::vector<HostRange> take_bounce(std::size_t bytes) {
    const Stopwatch watch(seconds_.host_memory);
    for (;;) {
      const std::size_t count = transfers_.size();
      try {
        return staging_.pool().take(bytes, count > 1 ? HostPool::Use::passing : HostPool::Use::must_pass);
      } catch (const Error& error) {
        if (count == 1 || error.kind != ErrorKind::out_of_host_memory) throw;
      }
      limit_transfers(count - 1);
      if (transfers_.size() == count) transfers_.front().done.get();  // a failed one keeps its memory: throw its error
    }
  }

  // Waits for the oldest transfers until at most `count` are left besides failed ones. A failed one keeps its memory,
  // since copies into it may still run; finish_oldest() throws its error.
  void limit_transfers(std::size_t count) {
    auto oldest = transfers_.begin();
    for (std::size_t failed = 0; transfers_.size() > failed + count;) {
      try {
        oldest->done.get();
      } catch (const std::exception&) {
        ++failed;
        ++oldest;
        continue;
      }
      staging_.pool().give(oldest->bounce, HostPool::Use::passing);
      oldest = transfers_.erase(oldest);
    }
  }

  void give_memory(Block& block) {
    staging_.pool().give(std::exchange(block.host, {}));
    staging_.files().give(std::exchange(block.file, {}));
    staging_.files().punch_holes();  // on a full disk this may be the only free space
  }

  Staging& staging_;
  Driver& driver_ = staging_.driver();
  const int device_ = staging_.device();
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
  FileTransfers transfers_;
  PipelineSeconds seconds_;
};

}  // namespace

PipelineSeconds Pipeline::save(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                               const std::function<void(std::size_t)>& drop) {
  return SaveTask(staging_, progress_, blocks, chunks, drop).run();
}

}  // namespace memsaver
