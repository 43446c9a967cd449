#include "backup/kept_content.hpp"
#include "backup/links.hpp"
#include "backup/pipeline.hpp"
#include "support/crew.hpp"

namespace memsaver {

namespace {

using Direction = Pipeline::Direction;

constexpr std::size_t kSampleEvery = 16;
// Threads that read blocks, and the part of a block of the shared store that one copies at once. All threads copy parts
// of the same block, so that it is there soon: 11.5 GB took 0.27 to 0.30 s (H100, 16 cores), in parts of 4 or 8 MiB
// 0.32 to 0.41.
constexpr std::size_t kReaders = 16;
// Links are borrowed after so many blocks, which take 7 ms. By then members that resume at the same time have begun:
// their devices count as in use, and no member waits until another one has given a buffer up.
constexpr std::size_t kOwnFirst = 16;
// Links are borrowed only if at least so many blocks are left: to open a link takes as long as five blocks.
constexpr std::ptrdiff_t kBorrowedFor = 16;
// Beside borrowed links so many blocks are under way on the process's own link.
constexpr std::size_t kOwnBlocks = 3;
const std::size_t kPartBytes = kBlockBytes / 16;

// Marks a block as not restored, and adds to the error what to do about it.
void note_damage(const ContentBlock& content, Error& error) {
  content.block->damaged = true;
  error.with_advice(
      "the memory stays released; repeat, or give this content up: release the tag with restore 'discard', resume it, "
      "and load the content anew");
}

// Marks a block as not restored. Returns an error that names it.
Error damaged_backup(const ContentBlock& content, const char* what) {
  Error error(ErrorKind::backup, what);
  note_damage(content, error);
  error.with_tag(content.tag).with_address(content.begin()).with_bytes(content.block->bytes);
  return error;
}

// Owns the packed content of one restore that is being unpacked.
class Unpacking {
 public:
  // Adds the seconds spent waiting to `seconds`.
  Unpacking(Pipeline& pipeline, PipelineSeconds& seconds) : pipeline_(pipeline), seconds_(seconds) {}

  // Starts to unpack a block from `memory`, as Pipeline::copy() takes it, which must stay until the copies that are
  // queued now are done. Without buffers several threads unpack it in host memory before this returns. Throws backup if
  // this block or an earlier one is damaged, out_of_host_memory or driver errors.
  void start(const ContentBlock& content, Direction direction, const std::vector<HostRange>& memory, Stream stream) {
    Packing& packing = pipeline_.packing;
    if (packing.buffers() == 0) return unpack_on_host(content, memory);
    const std::size_t packed_bytes = content.block->packed_bytes;
    const Extent& extent = content.block->extents.front();
    if (blocks_.size() == packing.buffers()) end_oldest();
    Packing::Buffer& buffer = packing.take();
    pipeline_.copy(direction, buffer.address, {{0, packed_bytes}}, memory, stream);
    pipeline_.record(stream)->hold(pipeline_.kernels);
    *buffer.result = 0;
    pipeline_.driver.unpack(pipeline_.device, {buffer.address, packed_bytes},
                            {content.base + extent.offset, extent.bytes}, buffer.result, pipeline_.kernels);
    packing.use(buffer, pipeline_.kernels);
    blocks_.emplace_back(&content, &buffer);
  }
  // Waits for what is under way, and gives the device memory back. Throws as start().
  void end() {
    while (!blocks_.empty()) end_oldest();
    pipeline_.packing.close();
  }

 private:
  static constexpr std::size_t kUnpackers = 8;

  void end_oldest() {
    const auto [content, buffer] = blocks_.front();
    blocks_.pop_front();
    {
      const Stopwatch watch(seconds_.copy);
      Packing::wait(*buffer);
    }
    if (*buffer->result != 0) throw damaged_backup(*content, "the packed backup is damaged and cannot be unpacked");
  }

  void unpack_on_host(const ContentBlock& content, const std::vector<HostRange>& memory) {
    const std::size_t bytes = content.block->content_bytes();
    if (unpacked_.size() < bytes) unpacked_.resize(bytes);
    const std::size_t threads = sys::threads_for(bytes, kUnpackers);
    if (!unpack_ranges(memory, content.block->packed_bytes, unpacked_.data(), bytes, threads)) {
      throw damaged_backup(content, "the packed backup is damaged and cannot be unpacked");
    }
    bounce_ = std::make_unique<HostPool::Bounce>(pipeline_.pool, bytes, HostPool::Use::must_pass);
    copy_to_ranges(unpacked_.data(), {{0, bytes}}, bounce_->ranges);
    pipeline_.copy(Direction::to_device, content.base, content.block->extents, bounce_->ranges, pipeline_.copies);
    pipeline_.record(pipeline_.copies)->wait();
    bounce_.reset();
  }

  Pipeline& pipeline_;
  PipelineSeconds& seconds_;
  std::deque<std::pair<const ContentBlock*, Packing::Buffer*>> blocks_;  // under way
  std::unique_ptr<HostPool::Bounce> bounce_;                             // stays until nothing is under way
  std::vector<unsigned char> unpacked_;
};

// Looks at a few places of new device memory, which should hold zeros: NVIDIA's driver clears memory when it is freed,
// from Turing on, unless its configuration forbids that (bScrubOnFreeEnabled in open-gpu-kernel-modules). A driver that
// does not clear leaves whole pages as they were, so that some of these places show it.
class NewMemory {
 public:
  explicit NewMemory(Pipeline& pipeline) : pipeline_(pipeline) {}

  // Queues the look at a chunk that nothing has written to. Returns false if it must be filled with zeros instead: this
  // driver has given memory that was not zero, or there is no room for more samples. Throws driver errors.
  bool sample(const ChunkRange& chunk) {
    if (!pipeline_.new_memory_is_zero || count_ + kPlaces > Pipeline::kSamples) return false;
    if (pipeline_.samples == nullptr) pipeline_.samples = std::make_unique<Pipeline::Samples>(pipeline_.driver);
    for (std::size_t i = 0; i < kPlaces; ++i, ++count_) {
      const std::size_t part = chunk.bytes / kPlaces;
      pipeline_.driver.copy_to_host(pipeline_.device, &(**pipeline_.samples)[count_],
                                    chunk.address + i * part + count_ * kStep % part, sizeof(std::uint64_t),
                                    pipeline_.kernels);
    }
    chunks_.push_back(&chunk);
    return true;
  }
  // Returns the chunks to be filled with zeros after all: those sampled, if one of them is not zero. Only once the
  // copies are done.
  std::vector<const ChunkRange*> not_zero() {
    if (count_ == 0) return {};
    const auto words = (*pipeline_.samples)->begin();
    if (std::all_of(words, words + count_, [](auto word) { return word == 0; })) return {};
    warn("new device memory is not zero; it is filled with zeros from now on");
    pipeline_.new_memory_is_zero = false;
    return std::exchange(chunks_, {});
  }

 private:
  static constexpr std::size_t kPlaces = 2;     // of each chunk
  static constexpr std::size_t kStep = 65'544;  // bytes; so that places differ from chunk to chunk

  Pipeline& pipeline_;
  std::size_t count_ = 0;
  std::vector<const ChunkRange*> chunks_;
};

// One Pipeline::restore(): acquires chunk after chunk, and copies and verifies blocks once they are mapped.
class RestoreTask {
 public:
  RestoreTask(Pipeline& pipeline, std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
              const std::function<void(std::size_t)>& acquire, VerifyChoice verify)
      : pipeline_(pipeline), blocks_(blocks), chunks_(chunks), acquire_(acquire), verify_(verify) {}

  PipelineSeconds run() {
    Cleanup on_failure([this] {
      links_.reset();
      pipeline_.quiesce(reads_);
    });
    const std::vector<std::size_t> packed = packed_first();
    prepare_bounce();
    for (const std::size_t i : packed) restore_chunk(i);
    if (links_) links_->wait();
    unpacking_.end();
    for (std::size_t i = 0; i < chunks_.size(); ++i) {
      if (restored_.count(i) == 0) restore_chunk(i);
    }
    if (links_) links_->wait();
    links_.reset();
    finish();
    on_failure.dismiss();
    return seconds_;
  }

 private:
  // Returns the chunks with packed content, and moves their blocks to the front. Calls lend() with the other chunks.
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

  // Acquires as many of `chunks`, which have no packed content, as the buffers for unpacking need.
  void lend(const std::vector<std::size_t>& chunks) {
    Packing& packing = pipeline_.packing;
    // A process that has packed nothing may restore what another one has packed.
    if (!driver_.has_packing(device_)) driver_.prepare_packing(device_);
    if (!packing.ready()) return;
    for (const std::size_t i : chunks) {
      if (packing.buffers() == Packing::kBuffers) return;
      if (chunks_[i].bytes < Packing::kBufferBytes) continue;
      acquire(i);
      lent_.insert(i);
      packing.borrow(chunks_[i].address, chunks_[i].bytes);
    }
    if (packing.buffers() > 0) return;
    // No chunk can lend memory, if another process packed the content: take what is free once all is mapped.
    for (std::size_t i = 0; i < chunks_.size(); ++i) acquire(i);
    static_cast<void>(packing.open(Packing::kBytes));
  }

  void acquire(std::size_t index) {
    if (!acquired_.insert(index).second) return;
    const Stopwatch watch(seconds_.driver);
    acquire_(index);
  }

  // While packed content is copied, restores one more chunk that has no content and is not lent. Few copies of packed
  // content can be queued, so they hide only short driver calls: such chunks are spread evenly over the packed blocks.
  void restore_ahead() {
    if (next_block_ % ahead_every_ != 0) return;
    while (!ahead_.empty() && acquired_.count(ahead_.front()) != 0) ahead_.pop_front();
    if (!ahead_.empty()) restore_chunk(ahead_.front());
  }

  void restore_chunk(std::size_t index) {
    restored_.insert(index);
    const ChunkRange& chunk = chunks_[index];
    acquire(index);
    if (chunk.zero) clear(index);
    while (next_block_ < blocks_.size() && chunk.contains(blocks_[next_block_])) {
      restore_next_block();
      restore_ahead();
    }
  }

  // Makes a chunk zero: new memory is, and is only looked at.
  void clear(std::size_t index) {
    const ChunkRange& chunk = chunks_[index];
    const bool under_content = next_block_ < blocks_.size() && chunk.contains(blocks_[next_block_]);
    try {
      if (!under_content && lent_.count(index) == 0 && new_memory_.sample(chunk)) return;
      // Content within the range (saved by an earlier release) must be written after the zeros: on the same stream.
      driver_.fill_zero(device_, chunk.address, chunk.bytes, under_content ? pipeline_.copies : pipeline_.kernels);
      if (under_content && links_) zeros_ = pipeline_.record(pipeline_.copies);
    } catch (Error& error) {
      throw error.with_tag(chunk.tag).with_address(chunk.address).with_bytes(chunk.bytes);
    }
  }

  void restore_next_block() {
    const std::size_t index = next_block_++;
    ContentBlock& content = blocks_[index];
    try {
      if (index == kOwnFirst) borrow_links();
      if (links_) links_->pump();
      restore_block(index);
    } catch (Error& error) {
      if (error.call == "pread") note_damage(content, error);
      throw error.with_tag(content.tag).with_address(content.begin()).with_bytes(content.block->bytes);
    }
  }

  void restore_block(std::size_t index) {
    const ContentBlock& content = blocks_[index];
    const Block& block = *content.block;
    if (block.kept == Kept::nothing) return;
    if (block.kept == Kept::zero) {
      for (const auto& extent : block.extents) {
        driver_.fill_zero(device_, content.base + extent.offset, extent.bytes, pipeline_.copies);
      }
      return note_restored(index, ContentBlock::Outcome::zero);
    }
    if (next_read_ <= index) {
      wait_for_uploads(0);  // no read is under way, so uploads have all bounce memory that is in use
      read_ahead();
    }
    if (!reads_.empty() && reads_.front().block == &block) {
      restore_from_read(content);
      note_restored(index, ContentBlock::Outcome::copied);
    } else if (!comes_over_a_link(index)) {
      copy_block(index);
    }
  }
  // Copies a block over the link of this device.
  void copy_block(std::size_t index) {
    const Block& block = *blocks_[index].block;
    pin(block);
    start_copy(blocks_[index], Direction::to_device, block.host, pipeline_.copies);
    if (links_) own_.push_back(pipeline_.record(pipeline_.copies));
    note_restored(index, ContentBlock::Outcome::copied);
  }
  void note_restored(std::size_t index, ContentBlock::Outcome outcome) {
    ContentBlock& content = blocks_[index];
    content.outcome = outcome;
    const std::size_t bytes = content.block->content_bytes();
    progress_.done_bytes += bytes;
    if (outcome == ContentBlock::Outcome::copied) progress_.copied_bytes += bytes;
    if (is_checked(*content.block)) add_to_window(index);
  }

  [[nodiscard]] static bool may_be_linked(const Block& block) {
    return block.shared && block.kept == Kept::host && block.kept_bytes() >= kBlockBytes / 4;
  }
  // Borrows links, if enough of the blocks that are left can come over them.
  void borrow_links() {
    const auto wanted = std::count_if(blocks_.begin() + kOwnFirst, blocks_.end(),
                                      [](const auto& content) { return may_be_linked(*content.block); });
    if (wanted < kBorrowedFor || pipeline_.store->index().peers().empty()) return;
    attempt_unless_lost("no link is borrowed", [this] {
      links_ = std::make_unique<BorrowedLinks>(
          pipeline_, [this](std::size_t index, Address from, Stream stream) { take(index, from, stream); },
          [this](std::size_t index) { copy_block(index); });
      if (!links_->any()) return links_.reset();
      zeros_ = pipeline_.record(pipeline_.copies);
    });
  }
  // Waits until the own link or another one is free for this block. Returns whether it is another one.
  [[nodiscard]] bool comes_over_a_link(std::size_t index) {
    const Block& block = *blocks_[index].block;
    if (!links_ || !may_be_linked(block)) return false;
    if (block.packed_bytes != 0 && pipeline_.packing.buffers() == 0) return false;
    while (!links_->ask(index, *block.shared)) {
      if (own_.size() < kOwnBlocks) return false;
      own_.front()->wait();
      own_.pop_front();
      links_->pump();
    }
    return true;
  }
  // Queues the rest of the way of a block that a link has brought.
  void take(std::size_t index, Address from, Stream stream) {
    const Block& block = *blocks_[index].block;
    if (zeros_) zeros_->hold(stream);
    start_copy(blocks_[index], Direction::on_device, {{from, block.kept_bytes()}}, stream);
    if (block.packed_bytes == 0) pipeline_.record(stream)->hold(pipeline_.kernels);  // else start_copy() has done so
    seconds_.linked_bytes += static_cast<double>(block.kept_bytes());
    note_restored(index, ContentBlock::Outcome::copied);
  }
  void restore_from_read(const ContentBlock& content) {
    {
      const Stopwatch watch(seconds_.copy);
      reads_.front().done.get();
      uploads_.splice(uploads_.end(), reads_, reads_.begin());
      start_copy(content, Direction::to_device, uploads_.back().bounce->ranges, pipeline_.copies);
      uploads_.back().copied = pipeline_.record(pipeline_.copies);
    }
    wait_for_uploads(kTransfers / 2);
    read_ahead();
  }

  // Pins what could not be read through bounce memory. If that fails it is copied all the same, but more slowly.
  void pin(const Block& block) {
    if (!block.shared) return;
    const Stopwatch watch(seconds_.host_memory);
    attempt("content is restored from memory that is not pinned", [&] { pipeline_.store->pin(block.host); });
  }

  // Starts to copy a block to the device from `memory`, which must stay until the copies that are queued now are done.
  void start_copy(const ContentBlock& content, Direction direction, const std::vector<HostRange>& memory,
                  Stream stream) {
    if (content.block->packed_bytes != 0) return unpacking_.start(content, direction, memory, stream);
    pipeline_.copy(direction, content.base, content.block->extents, memory, stream);
  }

  // Returns whether a block passes through bounce memory. What another process wrote to the shared store, and is not
  // pinned here, does: to read it with several threads is faster than to pin it.
  [[nodiscard]] bool passes(const Block& block) const {
    return block.kept == Kept::file ||
           (block.kept == Kept::host && block.shared && !pipeline_.store->is_pinned(block.host));
  }

  // Starts to pin the bounce memory of all the first reads: otherwise each would wait for its own.
  void prepare_bounce() {
    std::size_t bytes = 0;
    std::size_t reads = 0;
    for (auto content = blocks_.begin(); content != blocks_.end() && reads < kTransfers; ++content) {
      if (!passes(*content->block)) continue;
      bytes += to_pages(content->block->kept_bytes());
      ++reads;
    }
    if (bytes > 0) pipeline_.pool.start_growth(bytes);
  }

  // Starts reads of the next blocks, as far as there is bounce memory.
  void read_ahead() {
    for (; next_read_ < blocks_.size(); ++next_read_) {
      const Block& block = *blocks_[next_read_].block;
      if (passes(block) && (reads_.size() + uploads_.size() >= kTransfers || !read_block(block))) return;
    }
  }

  // Returns false if bounce memory is short until transfers under way return theirs. Skips a block of the shared store
  // for which there is no memory, and returns false, too: it is copied from where it is.
  bool read_block(const Block& block) {
    const bool in_file = block.kept == Kept::file;
    std::unique_ptr<HostPool::Bounce> bounce;
    try {
      const Stopwatch watch(seconds_.host_memory);
      bounce = pipeline_.bounce(block.kept_bytes(), reads_.empty() && uploads_.empty());
    } catch (const Error& error) {
      if (in_file || error.kind == ErrorKind::context_lost) throw;
      ++next_read_;
      return false;
    }
    if (!bounce) return false;
    FileTransfer& read = reads_.emplace_back();
    read.block = &block;
    read.bounce = std::move(bounce);
    const std::vector<HostRange>& memory = read.bounce->ranges;
    const std::size_t bytes = block.kept_bytes();
    read.done = readers_.run(in_file ? 1 : round_up(bytes, kPartBytes) / kPartBytes,
                             [&files = pipeline_.files, &block, &memory, in_file](auto part) {
                               if (in_file) return files.read(block.file, memory);
                               copy_part(block.host, memory, part * kPartBytes, (part + 1) * kPartBytes);
                             });
    return true;
  }

  // Waits for the oldest uploads until `keep` are left, and returns their bounce memory.
  void wait_for_uploads(std::size_t keep) {
    while (uploads_.size() > keep) {
      uploads_.front().copied->wait();
      uploads_.pop_front();
    }
  }

  // Content from the file is always checked: that costs little compared with the read.
  bool is_checked(const Block& block) {
    return digests_ != nullptr && block.digest &&
           (verify_ == VerifyChoice::full || block.kept == Kept::file || samples_++ % kSampleEvery == 0);
  }

  void add_to_window(std::size_t index) {
    const DigestJob job{blocks_[index].base, &blocks_[index].block->extents};
    if (!window_.add(job, kLargestWindow)) {
      submit_window();
      (void)window_.add(job, kLargestWindow);
    }
    checked_.push_back(index);
  }

  void submit_window() {
    if (window_.jobs().empty()) return;
    if (digests_->full()) check_oldest_window();
    pipeline_.record(pipeline_.copies)->hold(pipeline_.kernels);
    digests_->submit(window_.jobs());
    window_ = {};
  }

  void check_oldest_window() {
    const Stopwatch watch(seconds_.digest);
    for (const auto& digest : digests_->collect()) {
      const ContentBlock& content = blocks_[checked_.front()];
      checked_.pop_front();
      if (digest == content.block->digest) continue;
      throw damaged_backup(content, "restored content differs from the digest of what was kept");
    }
  }

  void finish() {
    submit_window();
    while (digests_ != nullptr && !digests_->empty()) check_oldest_window();
    const Stopwatch watch(seconds_.copy);
    wait_for_uploads(0);
    pipeline_.record(pipeline_.copies)->wait();
    const bool any_zero = std::any_of(chunks_.begin(), chunks_.end(), [](const auto& chunk) { return chunk.zero; });
    if (any_zero || digests_ != nullptr) pipeline_.record(pipeline_.kernels)->wait();
    if (const auto dirty = new_memory_.not_zero(); !dirty.empty()) {
      for (const auto* const chunk : dirty) {
        driver_.fill_zero(device_, chunk->address, chunk->bytes, pipeline_.kernels);
      }
      pipeline_.record(pipeline_.kernels)->wait();
    }
    for (auto& content : blocks_) content.block->damaged = false;
  }

  Pipeline& pipeline_;
  Driver& driver_ = pipeline_.driver;
  const int device_ = pipeline_.device;
  Progress& progress_ = pipeline_.progress;
  std::vector<ContentBlock>& blocks_;
  const std::vector<ChunkRange>& chunks_;
  const std::function<void(std::size_t)>& acquire_;
  const VerifyChoice verify_;
  std::set<std::size_t> acquired_;  // chunks
  std::set<std::size_t> lent_;      // chunks that packed content passed through
  std::set<std::size_t> restored_;  // chunks that are restored, or being restored
  std::deque<std::size_t> ahead_;   // chunks without content, if there is packed content
  std::size_t ahead_every_ = 1;     // blocks
  Crew readers_{sys::up_to_cores(kReaders)};
  DigestQueue* const digests_ = verify_ != VerifyChoice::off ? pipeline_.digests() : nullptr;
  std::size_t next_block_ = 0;
  std::size_t next_read_ = 0;  // block to look at for the next read
  FileTransfers reads_;        // in the order of the blocks
  FileTransfers uploads_;      // on the way to the device, likewise
  std::size_t samples_ = 0;    // blocks that were candidates for a sampled check
  DigestQueue::Batch window_;
  std::deque<std::size_t> checked_;  // blocks whose digests are under way, or in the window
  PipelineSeconds seconds_;
  Unpacking unpacking_{pipeline_, seconds_};
  std::unique_ptr<BorrowedLinks> links_;  // null without
  std::deque<Recorded> own_;              // the blocks under way on the link of this device
  Recorded zeros_;                        // the last zeros under content
  NewMemory new_memory_{pipeline_};
};

}  // namespace

PipelineSeconds Pipeline::restore(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                                  const std::function<void(std::size_t)>& acquire, VerifyChoice verify) {
  return RestoreTask(*this, blocks, chunks, acquire, verify).run();
}

}  // namespace memsaver
