#include <algorithm>
#include <deque>
#include <optional>
#include <set>
#include <string>

#include "backup/pipeline.hpp"
#include "backup/unpacking.hpp"
#include "support/error.hpp"
#include "support/log.hpp"
#include "support/scope_exit.hpp"
#include "support/system.hpp"

namespace memsaver {

namespace {

constexpr std::size_t kSampleEvery = 16;

// One Pipeline::restore(): acquires chunk after chunk, and copies and verifies blocks as soon as they are mapped.
class RestoreTask {
 public:
  RestoreTask(Staging& staging, Progress& progress, std::vector<ContentBlock>& blocks,
              const std::vector<ChunkRange>& chunks, const std::function<void(std::size_t)>& acquire,
              VerifyChoice verify)
      : staging_(staging), progress_(progress), blocks_(blocks), chunks_(chunks), acquire_(acquire), verify_(verify) {}

  PipelineSeconds run() {
    verifying_ = verify_ != VerifyChoice::off && staging_.can_digest();
    try {
      for (const std::size_t i : packed_first()) restore_chunk(i);
      unpacking_.end();
      for (std::size_t i = 0; i < chunks_.size(); ++i) {
        if (restored_.count(i) == 0) restore_chunk(i);
      }
      finish();
    } catch (...) {
      staging_.settle(reads_);
      for (const auto& landing : landings_) {
        if (landing.event) driver_.recycle(device_, *landing.event);
        staging_.pool().give(landing.bounce, HostPool::Use::passing);
      }
      throw;
    }
    return seconds_;
  }

 private:
  // Bounce memory on its way to the device; free once `event` has passed.
  struct Landing {
    std::vector<HostRange> bounce;
    std::optional<Event> event;
  };
  // The chunks with packed content. Puts the blocks in them first. Other chunks are acquired before them, and lend
  // their memory for unpacking until their own content comes.
  std::vector<std::size_t> packed_first() {
    std::vector<std::size_t> packed;
    std::vector<std::size_t> others;
    std::deque<std::size_t> bare;  // of others, those without content
    std::vector<ContentBlock> first;
    std::vector<ContentBlock> last;
    std::size_t block = 0;
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      const std::size_t begin = block;
      while (block < blocks_.size() && chunks_[i].contains(blocks_[block])) ++block;
      const auto from = blocks_.begin() + static_cast<std::ptrdiff_t>(begin);
      const auto to = blocks_.begin() + static_cast<std::ptrdiff_t>(block);
      const bool any = std::any_of(from, to, [](const auto& each) { return each.block->packed_bytes != 0; });
      (any ? packed : others).push_back(i);
      if (from == to) bare.push_back(i);
      auto& target = any ? first : last;
      target.insert(target.end(), from, to);
    }
    if (block != blocks_.size()) throw Error(ErrorKind::backup, "content to restore is not in one of the chunks");
    if (!packed.empty()) {
      lend(others);
      ahead_every_ = std::max<std::size_t>(1, first.size() / std::max<std::size_t>(1, bare.size()));
      ahead_.swap(bare);
    }
    first.insert(first.end(), last.begin(), last.end());
    blocks_.swap(first);
    return packed;
  }

  void lend(const std::vector<std::size_t>& chunks) {
    Packing& packing = staging_.packing();
    // What another process packed may be the first that this one unpacks.
    if (!driver_.has_packing(device_)) driver_.prepare_packing(device_);
    if (!packing.ready()) return;
    for (const std::size_t i : chunks) {
      if (packing.buffers() == Packing::kBuffers) return;
      if (chunks_[i].bytes < Packing::kBufferBytes) continue;
      acquire(i);
      packing.borrow(chunks_[i].address, chunks_[i].bytes);
    }
  }

  void acquire(std::size_t index) {
    if (!acquired_.insert(index).second) return;
    const Stopwatch watch(seconds_.driver);
    acquire_(index);
  }

  // Restores one more chunk without content, that lends nothing, beside the packed content that is on its way: few
  // copies of that can be queued, so what comes after it is not hidden by them. Spread over all of them, so that the
  // driver's calls for one chunk take less time than the copies that are queued.
  void restore_ahead() {
    if (next_block_ % ahead_every_ != 0) return;
    while (!ahead_.empty() && acquired_.count(ahead_.front()) != 0) ahead_.pop_front();
    if (!ahead_.empty()) restore_chunk(ahead_.front());
  }

  void restore_chunk(std::size_t index) {
    restored_.insert(index);
    const ChunkRange& chunk = chunks_[index];
    acquire(index);
    if (chunk.zero) fill_zero(chunk);
    while (next_block_ < blocks_.size() && chunk.contains(blocks_[next_block_])) {
      restore_next_block();
      restore_ahead();
    }
  }

  void fill_zero(const ChunkRange& chunk) {
    // Content within the range (saved by an earlier release) must be written after the zeros: on the same stream.
    const bool under_content = next_block_ < blocks_.size() && chunk.contains(blocks_[next_block_]);
    try {
      driver_.fill_zero(device_, chunk.address, chunk.bytes, under_content ? staging_.copies() : staging_.kernels());
    } catch (Error& error) {
      throw error.with_tag(chunk.tag).with_address(chunk.address).with_bytes(chunk.bytes);
    }
  }

  void restore_next_block() {
    const std::size_t index = next_block_++;
    ContentBlock& content = blocks_[index];
    try {
      restore_block(index);
    } catch (Error& error) {
      if (error.call == "pread") note_damage(content, error);
      throw error.with_tag(content.tag).with_address(content.begin()).with_bytes(content.block->bytes);
    }
  }

  void restore_block(std::size_t index) {
    ContentBlock& content = blocks_[index];
    Block& block = *content.block;
    const std::size_t bytes = block.content_bytes();
    switch (block.kept) {
      case Kept::nothing:
        return;
      case Kept::zero:
        for (const auto& extent : block.extents) {
          driver_.fill_zero(device_, content.base + extent.offset, extent.bytes, staging_.copies());
        }
        break;
      case Kept::host:
        pin(block);
        bring(content, block.host);
        break;
      case Kept::file:
        restore_from_file(content);
        break;
    }
    const bool zero = block.kept == Kept::zero;
    content.outcome = zero ? ContentBlock::Outcome::zero : ContentBlock::Outcome::copied;
    if (!zero) progress_.copied_bytes += bytes;
    progress_.done_bytes += bytes;
    if (is_checked(block)) add_to_window(index);
  }

  void restore_from_file(const ContentBlock& content) {
    if (reads_.empty()) land(0);  // all bounce memory is on its way to the device
    read_ahead();
    {
      const Stopwatch watch(seconds_.copy);
      reads_.front().done.get();
      landings_.push_back({reads_.front().bounce, std::nullopt});
      reads_.pop_front();
      const std::size_t own = landings_.size() - 1;
      bring(content, landings_[own].bounce);
      landings_[own].event = driver_.record(device_, staging_.copies());
    }
    land(kFileTransfers / 2);
    read_ahead();
  }

  // What another process wrote to the shared store may not be pinned by this one yet. Unpinned it is copied, too, but
  // more slowly.
  void pin(const Block& block) {
    if (!block.shared) return;
    const Stopwatch watch(seconds_.host_memory);
    try {
      staging_.store()->pin(block.host);
    } catch (const Error& error) {
      warn(std::string("content is restored from memory that is not pinned: ") + error.what());
    }
  }

  // Starts to bring a block's content to the device from `memory`, which must stay until the stream of copies has
  // passed this.
  void bring(const ContentBlock& content, const std::vector<HostRange>& memory) {
    if (content.block->packed_bytes != 0) return unpacking_.bring(content, memory);
    staging_.copy(Staging::Direction::to_device, content.base, content.block->extents, memory);
  }

  // Starts reads of the next blocks that are in the file, as far as there is bounce memory; of at least one if none is
  // under way.
  void read_ahead() {
    for (; next_read_ < blocks_.size() && reads_.size() + landings_.size() < kFileTransfers; ++next_read_) {
      const Block& block = *blocks_[next_read_].block;
      if (block.kept == Kept::file && !read_block(block)) return;
    }
  }

  // Returns false if bounce memory is short and will be returned by transfers under way.
  bool read_block(const Block& block) {
    const bool alone = reads_.empty() && landings_.empty();
    FileTransfer& read = reads_.emplace_back();
    try {
      read.bounce = staging_.pool().take(block.file.bytes, alone ? HostPool::Use::must_pass : HostPool::Use::passing);
    } catch (const Error& error) {
      reads_.pop_back();
      if (alone || error.kind != ErrorKind::out_of_host_memory) throw;
      return false;
    }
    read.done =
        sys::run_beside([this, range = block.file, memory = read.bounce] { staging_.files().read(range, memory); });
    return true;
  }

  // Waits for the oldest landings until `keep` are left, and returns their bounce memory.
  void land(std::size_t keep) {
    while (landings_.size() > keep) {
      const Landing& landing = landings_.front();
      driver_.wait(device_, *landing.event);
      driver_.recycle(device_, *landing.event);
      staging_.pool().give(landing.bounce, HostPool::Use::passing);
      landings_.pop_front();
    }
  }

  // Content from the file is always checked: that costs little compared with the read.
  bool is_checked(const Block& block) {
    return verifying_ && block.has_digest &&
           (verify_ == VerifyChoice::full || block.kept == Kept::file || samples_++ % kSampleEvery == 0);
  }

  void add_to_window(std::size_t index) {
    const Block& block = *blocks_[index].block;
    const std::size_t bytes = block.content_bytes();
    const std::size_t items = DigestQueue::items_of(block.extents);
    if (window_bytes_ + bytes > kLargestWindow || window_items_ + items > DigestQueue::kSlotItems) submit_window();
    window_.push_back(index);
    window_bytes_ += bytes;
    window_items_ += items;
  }

  void submit_window() {
    if (window_.empty()) return;
    if (staging_.digests().full()) check_oldest_window();
    const Event restored = driver_.record(device_, staging_.copies());
    const ScopeExit recycle([&] { driver_.recycle(device_, restored); });
    driver_.stream_wait(device_, staging_.kernels(), restored);
    std::vector<DigestJob> jobs;
    for (const std::size_t i : window_) jobs.push_back({blocks_[i].base, &blocks_[i].block->extents});
    staging_.digests().submit(jobs);
    submitted_.insert(submitted_.end(), window_.begin(), window_.end());
    window_.clear();
    window_bytes_ = window_items_ = 0;
  }

  void check_oldest_window() {
    const Stopwatch watch(seconds_.digest);
    for (const auto& digest : staging_.digests().collect()) {
      const ContentBlock& content = blocks_[submitted_.front()];
      submitted_.pop_front();
      if (digest == content.block->digest) continue;
      throw damaged_backup(content, "restored content differs from the digest of what was kept");
    }
  }

  void finish() {
    submit_window();
    while (verifying_ && !staging_.digests().empty()) check_oldest_window();
    const Stopwatch watch(seconds_.copy);
    land(0);
    staging_.wait_for(staging_.copies());
    const bool any_zero = std::any_of(chunks_.begin(), chunks_.end(), [](const auto& chunk) { return chunk.zero; });
    if (any_zero || verifying_) staging_.wait_for(staging_.kernels());
    for (auto& content : blocks_) content.block->damaged = false;
  }

  Staging& staging_;
  Driver& driver_ = staging_.driver();
  const int device_ = staging_.device();
  Progress& progress_;
  std::vector<ContentBlock>& blocks_;
  const std::vector<ChunkRange>& chunks_;
  const std::function<void(std::size_t)>& acquire_;
  const VerifyChoice verify_;
  std::set<std::size_t> acquired_;  // chunks
  std::set<std::size_t> restored_;  // chunks whose turn has come
  std::deque<std::size_t> ahead_;   // chunks without content, if there is packed content
  std::size_t ahead_every_ = 1;     // blocks
  bool verifying_ = false;
  std::size_t next_block_ = 0;
  std::size_t next_read_ = 0;     // block to look at for the next read from the file
  FileTransfers reads_;           // in the order of the blocks
  std::deque<Landing> landings_;  // likewise
  std::size_t samples_ = 0;       // blocks that were candidates for a sampled check
  std::vector<std::size_t> window_;
  std::size_t window_bytes_ = 0;
  std::size_t window_items_ = 0;
  std::deque<std::size_t> submitted_;  // blocks whose digests are under way
  PipelineSeconds seconds_;
  Unpacking unpacking_{staging_, seconds_};
};

}  // namespace

PipelineSeconds Pipeline::restore(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                                  const std::function<void(std::size_t)>& acquire, VerifyChoice verify) {
  return RestoreTask(staging_, progress_, blocks, chunks, acquire, verify).run();
}

}  // namespace memsaver
