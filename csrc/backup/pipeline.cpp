#include "backup/pipeline.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <limits>
#include <utility>

#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/log.hpp"
#include "support/sizes.hpp"
#include "support/stopwatch.hpp"
#include "support/system.hpp"

namespace memsaver {

namespace {

// Windows are what is digested and decided at once. They grow, so that the first memory is given back soon (64 MiB
// cross a 55 GB/s link in 1.2 ms) and later ones keep every multiprocessor busy.
constexpr std::size_t kFirstWindow = 64 * kSizeUnit;
constexpr std::size_t kLargestWindow = 1024 * kSizeUnit;
constexpr std::size_t kFileTransfers = 8;
constexpr std::size_t kSampleEvery = 16;

constexpr char kGiveUp[] =
    "the memory stays released; repeat, or give this content up: release the tag with restore 'discard', resume it, "
    "and load the content anew";

// Runs a function at the end of a scope, however it ends.
template <typename Function>
class AtExit {
 public:
  explicit AtExit(Function function) : function_(std::move(function)) {}
  AtExit(const AtExit&) = delete;
  AtExit& operator=(const AtExit&) = delete;
  ~AtExit() { function_(); }

 private:
  Function function_;
};

// Cuts a list of contents into windows that grow from kFirstWindow to kLargestWindow and fit a batch of digests.
class Windows {
 public:
  using Extents = std::function<const std::vector<Extent>&(std::size_t)>;
  Windows(std::size_t count, Extents extents) : count_(count), extents_(std::move(extents)) {}

  [[nodiscard]] bool more() const { return at_ < count_; }
  // [begin, end) of the next window; never empty while more().
  std::pair<std::size_t, std::size_t> next() {
    const std::size_t begin = at_;
    std::size_t bytes = 0;
    std::size_t items = 0;
    while (at_ < count_) {
      const auto& extents = extents_(at_);
      const std::size_t further = DigestQueue::items_of(extents);
      if (at_ > begin && (bytes + sum_of(extents) > size_ || items + further > DigestQueue::kSlotItems)) break;
      bytes += sum_of(extents);
      items += further;
      ++at_;
    }
    size_ = std::min(2 * size_, kLargestWindow);
    return {begin, at_};
  }

 private:
  std::size_t count_;
  Extents extents_;
  std::size_t at_ = 0;
  std::size_t size_ = kFirstWindow;
};

}  // namespace

// Blocks whose copies end at one event, and the chunks that may go once they are kept.
struct Pipeline::Pending {
  struct Copied {
    std::size_t index;
    Kept kept;
    bool has_digest;
    Digest digest;
  };
  std::vector<Copied> copied;
  std::vector<std::shared_future<void>> writes;
  bool has_event = false;
  Event event{};
  std::vector<std::size_t> chunks;
};

Pipeline::Pipeline(Driver& driver, int device, HostPool& pool, FileStore& files, const DigestKey& key,
                   Progress& progress)
    : driver_(driver), device_(device), pool_(pool), files_(files), key_(key), progress_(progress) {
  copies_ = driver_.create_stream(device_);
  try {
    kernels_ = driver_.create_stream(device_);
  } catch (...) {
    destroy_stream(copies_);
    throw;
  }
}

Pipeline::~Pipeline() {
  settle();
  digests_.reset();
  destroy_stream(copies_);
  destroy_stream(kernels_);
}

void Pipeline::destroy_stream(Stream stream) noexcept {
  try {
    driver_.destroy_stream(device_, stream);
  } catch (const std::exception& error) {
    warn(std::string("a stream is left behind: ") + error.what());  // at process exit the device may be gone before us
  }
}

bool Pipeline::can_digest() {
  if (!driver_.has_digest(device_)) return false;
  if (!digests_) digests_ = std::make_unique<DigestQueue>(driver_, device_, key_, kernels_);
  return true;
}

PipelineSeconds Pipeline::save(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                               const std::function<void(std::size_t)>& drop) {
  seconds_ = {};
  const bool digesting = can_digest();
  Windows windows(blocks.size(), [&](std::size_t i) -> const std::vector<Extent>& { return blocks[i].live; });
  std::deque<std::pair<std::size_t, std::size_t>> submitted;
  const auto submit = [&] {
    if (!windows.more()) return;
    const auto window = windows.next();
    if (digesting) {
      std::vector<DigestJob> jobs;
      for (std::size_t i = window.first; i < window.second; ++i) jobs.push_back({blocks[i].base, &blocks[i].live});
      digests_->submit(jobs);
    }
    submitted.push_back(window);
  };

  std::deque<Pending> queue;
  std::size_t next_chunk = 0;
  const auto drop_before = [&](Address decided, Pending& pending) {
    while (next_chunk < chunks.size() && chunks[next_chunk].address + chunks[next_chunk].bytes <= decided) {
      pending.chunks.push_back(next_chunk++);
    }
  };
  const auto finish_ready = [&] {
    while (!queue.empty() && ready(queue.front())) {
      finish(queue.front(), blocks, drop);
      queue.pop_front();
    }
  };
  try {
    submit();
    while (!submitted.empty()) {
      submit();  // one window ahead, so that the device digests while this thread decides
      const auto window = submitted.front();
      submitted.pop_front();
      std::vector<Digest> found;
      if (digesting) {
        const Stopwatch watch(seconds_.digest);
        found = digests_->collect();
      }
      Pending& pending = queue.emplace_back();
      for (std::size_t i = window.first; i < window.second; ++i) {
        keep(blocks[i], i, digesting ? &found[i - window.first] : nullptr, pending);
      }
      drop_before(window.second < blocks.size() ? blocks[window.second].begin() : std::numeric_limits<Address>::max(),
                  pending);
      if (!pending.copied.empty()) {
        pending.event = driver_.record(device_, copies_);
        pending.has_event = true;
      }
      finish_ready();
    }
    drop_before(std::numeric_limits<Address>::max(), queue.emplace_back());
    while (!queue.empty()) {
      finish(queue.front(), blocks, drop);
      queue.pop_front();
    }
    wait_for_streams();
    give_transfers();
  } catch (...) {
    settle();
    for (auto& pending : queue) {
      if (pending.has_event) driver_.recycle(device_, pending.event);
    }
    throw;
  }
  return seconds_;
}

// Decides what becomes of one block and begins its copy where it needs one.
void Pipeline::keep(ContentBlock& content, std::size_t index, const Digest* digest, Pending& pending) {
  Block& block = *content.block;
  const std::size_t bytes = sum_of(content.live);
  block.damaged = false;
  const bool in_place = block.kept == Kept::zero || block.kept == (content.to_file ? Kept::file : Kept::host);
  if (digest != nullptr && in_place && block.has_digest && block.extents == content.live && block.digest == *digest) {
    content.outcome = ContentBlock::Outcome::unchanged;
    progress_.done_bytes += bytes;
    return;
  }
  block.kept = Kept::nothing;
  block.extents = content.live;
  block.has_digest = false;
  if (bytes == 0 || (digest != nullptr && digest->any == 0)) {
    release_memory(block);
    block.kept = Kept::zero;
    block.has_digest = digest != nullptr;
    if (digest != nullptr) block.digest = *digest;
    content.outcome = ContentBlock::Outcome::zero;
    progress_.done_bytes += bytes;
    return;
  }
  const std::size_t room = to_pages(bytes);
  try {
    if (content.to_file) {
      if (block.file.bytes != room) {
        release_memory(block);
        block.file = files_.take(room);
      }
      limit_transfers(kFileTransfers - 1);
      FileTransfer& transfer = transfers_.emplace_back();  // settle() gives its memory up, whatever throws from here on
      transfer.bounce = take_bounce(bytes);
      copy(true, content.base, content.live, transfer.bounce);
      const Event copied = driver_.record(device_, copies_);
      transfer.done = sys::run_beside([this, copied, range = block.file, memory = transfer.bounce] {
        const AtExit recycle([&] { driver_.recycle(device_, copied); });
        driver_.wait(device_, copied);
        files_.write(range, memory);
      });
      pending.writes.push_back(transfer.done);
    } else {
      if (sum_of(block.host) != room) {
        release_memory(block);
        const Stopwatch watch(seconds_.host_memory);
        block.host = pool_.take(bytes);
      }
      copy(true, content.base, content.live, block.host);
    }
  } catch (Error& error) {
    throw error.with_tag(content.tag).with_bytes(bytes);
  }
  pending.copied.push_back(
      {index, content.to_file ? Kept::file : Kept::host, digest != nullptr, digest != nullptr ? *digest : Digest{}});
}

bool Pipeline::ready(Pending& pending) {
  if (pending.has_event && !driver_.done(device_, pending.event)) return false;
  return std::all_of(pending.writes.begin(), pending.writes.end(), [](const auto& write) {
    return write.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  });
}

void Pipeline::finish(Pending& pending, std::vector<ContentBlock>& blocks,
                      const std::function<void(std::size_t)>& drop) {
  {
    const Stopwatch watch(seconds_.copy);
    if (pending.has_event) {
      driver_.wait(device_, pending.event);
      driver_.recycle(device_, pending.event);
      pending.has_event = false;
    }
    for (const auto& write : pending.writes) write.get();
  }
  for (const auto& copied : pending.copied) {
    ContentBlock& content = blocks[copied.index];
    content.block->kept = copied.kept;
    content.block->has_digest = copied.has_digest;
    content.block->digest = copied.digest;
    content.outcome = ContentBlock::Outcome::copied;
    const std::size_t bytes = sum_of(content.live);
    progress_.done_bytes += bytes;
    progress_.copied_bytes += bytes;
  }
  pending.copied.clear();
  const Stopwatch watch(seconds_.driver);
  for (const std::size_t chunk : pending.chunks) drop(chunk);
}

PipelineSeconds Pipeline::restore(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                                  const std::function<void(std::size_t)>& acquire, Verify verify) {
  seconds_ = {};
  const bool verifying = verify != Verify::off && can_digest();

  // Bounce memory of files under way to the device, in order; each is free again when its event has passed. Where there
  // is no event yet, or waiting for it failed, that is when all is settled.
  std::deque<std::pair<Event, std::vector<HostRange>>> landing;
  const auto land = [&](std::size_t keep_count) {
    while (landing.size() > keep_count) {
      const auto& [event, bounce] = landing.front();
      driver_.wait(device_, event);
      driver_.recycle(device_, event);
      pool_.give(bounce, HostPool::Use::passing);
      landing.pop_front();
    }
  };
  std::size_t next_read = 0;
  const auto read_ahead = [&] {
    for (; next_read < blocks.size() && transfers_.size() + landing.size() < kFileTransfers; ++next_read) {
      const Block& block = *blocks[next_read].block;
      if (block.kept != Kept::file) continue;
      const bool first = transfers_.empty() && landing.empty();
      FileTransfer& transfer = transfers_.emplace_back();
      try {
        transfer.bounce = pool_.take(block.file.bytes, first ? HostPool::Use::must_pass : HostPool::Use::passing);
      } catch (const Error& error) {
        transfers_.pop_back();
        if (first || error.kind != ErrorKind::out_of_host_memory) throw;
        return;  // when those under way have landed there is more
      }
      transfer.done =
          sys::run_beside([this, range = block.file, memory = transfer.bounce] { files_.read(range, memory); });
    }
  };

  std::deque<std::size_t> checked;  // blocks whose digests are under way, in order
  const auto compare = [&] {
    const Stopwatch watch(seconds_.digest);
    for (const auto& digest : digests_->collect()) {
      const ContentBlock& content = blocks[checked.front()];
      checked.pop_front();
      if (digest == content.block->digest) continue;
      content.block->damaged = true;
      throw Error(ErrorKind::backup, "restored content differs from the digest of what was kept")
          .with_tag(content.tag)
          .with_address(content.begin())
          .with_bytes(content.block->bytes)
          .with_advice(kGiveUp);
    }
  };
  std::vector<std::size_t> window;
  std::size_t window_bytes = 0;
  std::size_t window_items = 0;
  const auto check_window = [&] {
    if (window.empty()) return;
    if (digests_->full()) compare();
    const Event restored = driver_.record(device_, copies_);
    const AtExit recycle([&] { driver_.recycle(device_, restored); });
    driver_.stream_wait(device_, kernels_, restored);
    std::vector<DigestJob> jobs;
    for (const std::size_t i : window) jobs.push_back({blocks[i].base, &blocks[i].block->extents});
    digests_->submit(jobs);
    checked.insert(checked.end(), window.begin(), window.end());
    window.clear();
    window_bytes = window_items = 0;
  };
  std::size_t restored_blocks = 0;
  const auto restore_block = [&](std::size_t index) {
    ContentBlock& content = blocks[index];
    Block& block = *content.block;
    const std::size_t bytes = block.content_bytes();
    switch (block.kept) {
      case Kept::nothing:
        return;
      case Kept::zero:
        for (const auto& extent : block.extents) {
          driver_.fill_zero(device_, content.base + extent.offset, extent.bytes, copies_);
        }
        content.outcome = ContentBlock::Outcome::zero;
        break;
      case Kept::host:
        copy(false, content.base, block.extents, block.host);
        progress_.copied_bytes += bytes;
        content.outcome = ContentBlock::Outcome::copied;
        break;
      case Kept::file: {
        if (transfers_.empty()) land(0);  // all bounce memory is on its way to the device
        read_ahead();
        {
          const Stopwatch watch(seconds_.copy);
          transfers_.front().done.get();
          auto& [event, bounce] = landing.emplace_back(Event{}, transfers_.front().bounce);
          transfers_.pop_front();
          copy(false, content.base, block.extents, bounce);
          event = driver_.record(device_, copies_);
        }
        land(kFileTransfers / 2);
        read_ahead();
        progress_.copied_bytes += bytes;
        content.outcome = ContentBlock::Outcome::copied;
        break;
      }
    }
    progress_.done_bytes += bytes;
    // What comes from a disk is always checked: that costs little beside the reading.
    const bool check = verifying && block.has_digest &&
                       (verify == Verify::full || block.kept == Kept::file || restored_blocks++ % kSampleEvery == 0);
    if (!check) return;
    const std::size_t items = DigestQueue::items_of(block.extents);
    if (window_bytes + bytes > kLargestWindow || window_items + items > DigestQueue::kSlotItems) check_window();
    window.push_back(index);
    window_bytes += bytes;
    window_items += items;
  };

  try {
    std::size_t next_block = 0;
    const auto restore_below = [&](Address mapped) {
      while (next_block < blocks.size() && blocks[next_block].end() <= mapped) {
        const std::size_t index = next_block++;
        try {
          restore_block(index);
        } catch (Error& error) {
          if (error.call == "pread") {
            blocks[index].block->damaged = true;
            error.with_advice(kGiveUp);
          }
          throw error.with_tag(blocks[index].tag)
              .with_address(blocks[index].begin())
              .with_bytes(blocks[index].block->bytes);
        }
      }
    };
    const bool any_zero = std::any_of(chunks.begin(), chunks.end(), [](const auto& chunk) { return chunk.zero; });
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      {
        const Stopwatch watch(seconds_.driver);
        acquire(i);
      }
      if (chunks[i].zero) {
        // Content that lies in a range owed zeros (kept by an earlier release) has to be written after them.
        const bool under_content =
            next_block < blocks.size() && blocks[next_block].begin() < chunks[i].address + chunks[i].bytes;
        try {
          driver_.fill_zero(device_, chunks[i].address, chunks[i].bytes, under_content ? copies_ : kernels_);
        } catch (Error& error) {
          throw error.with_tag(chunks[i].tag).with_address(chunks[i].address).with_bytes(chunks[i].bytes);
        }
      }
      // Chunks under content come first and in address order: all below the next of them is mapped.
      const bool more_below =
          i + 1 < chunks.size() && next_block < blocks.size() && chunks[i + 1].address > chunks[i].address;
      restore_below(more_below ? chunks[i + 1].address : chunks[i].address + chunks[i].bytes);
    }
    restore_below(std::numeric_limits<Address>::max());
    check_window();
    while (digests_ && !digests_->empty()) compare();
    const Stopwatch watch(seconds_.copy);
    land(0);
    for (const Stream stream : {copies_, kernels_}) {
      if (stream == kernels_ && !any_zero && !verifying) continue;
      const Event end = driver_.record(device_, stream);
      const AtExit recycle([&] { driver_.recycle(device_, end); });
      driver_.wait(device_, end);
    }
    for (auto& content : blocks) content.block->damaged = false;
  } catch (...) {
    settle();
    for (auto& [event, bounce] : landing) {
      if (event != Event{}) driver_.recycle(device_, event);
      pool_.give(bounce, HostPool::Use::passing);
    }
    throw;
  }
  return seconds_;
}

// Copies extents, in order, from or to memory that holds them one after another.
void Pipeline::copy(bool to_host, Address base, const std::vector<Extent>& extents,
                    const std::vector<HostRange>& memory) {
  auto part = memory.begin();
  std::size_t used = 0;
  for (const auto& extent : extents) {
    std::size_t done = 0;
    while (done < extent.bytes) {
      if (used == part->bytes) {
        ++part;
        used = 0;
      }
      const std::size_t bytes = std::min(extent.bytes - done, part->bytes - used);
      const Address device_address = base + extent.offset + done;
      auto* const host_address = reinterpret_cast<void*>(part->address + used);
      if (to_host) {
        driver_.copy_to_host(device_, host_address, device_address, bytes, copies_);
      } else {
        driver_.copy_to_device(device_, device_address, host_address, bytes, copies_);
      }
      done += bytes;
      used += bytes;
    }
  }
}

// Memory through which the last of transfers_ goes. Where there is too little for more of them at once, it waits for
// the others; the only one always gets its own.
std::vector<HostRange> Pipeline::take_bounce(std::size_t bytes) {
  const Stopwatch watch(seconds_.host_memory);
  for (;;) {
    const std::size_t count = transfers_.size();
    try {
      return pool_.take(bytes, count > 1 ? HostPool::Use::passing : HostPool::Use::must_pass);
    } catch (const Error& error) {
      if (count == 1 || error.kind != ErrorKind::out_of_host_memory) throw;
    }
    limit_transfers(count - 1);
    if (transfers_.size() == count) transfers_.front().done.get();  // it failed, and keeps its memory
  }
}

// Lets the oldest of more than `count` transfers end. Those that failed stay, and so does their memory: the copies to
// it may not have ended. finish() tells of them.
void Pipeline::limit_transfers(std::size_t count) {
  auto oldest = transfers_.begin();
  for (std::size_t failed = 0; transfers_.size() > failed + count;) {
    try {
      oldest->done.get();
    } catch (const std::exception&) {
      ++failed;
      ++oldest;
      continue;
    }
    pool_.give(oldest->bounce, HostPool::Use::passing);
    oldest = transfers_.erase(oldest);
  }
}

// Nothing of ours runs on the device or in a thread after this, whatever happened before.
void Pipeline::settle() noexcept {
  for (const auto& transfer : transfers_) {
    if (transfer.done.valid()) transfer.done.wait();
  }
  if (digests_) digests_->abandon();
  try {
    wait_for_streams();
  } catch (const std::exception& error) {
    warn(std::string("while waiting for copies to end: ") + error.what());
    quiesce();
  }
  give_transfers();
}

void Pipeline::wait_for_streams() {
  for (const Stream stream : {copies_, kernels_}) {
    const Event end = driver_.record(device_, stream);
    const AtExit recycle([&] { driver_.recycle(device_, end); });
    driver_.wait(device_, end);
  }
}

void Pipeline::give_transfers() {
  for (const auto& transfer : transfers_) pool_.give(transfer.bounce, HostPool::Use::passing);
  transfers_.clear();
}

// Waits for the whole device, where its streams cannot be waited for one by one. A device that cannot be synchronized
// either has lost its context and runs nothing any more.
void Pipeline::quiesce() noexcept {
  try {
    driver_.synchronize(device_);
  } catch (const std::exception& error) {
    warn(std::string("while waiting for the device: ") + error.what());
  }
}

void Pipeline::release_memory(Block& block) {
  pool_.give(std::exchange(block.host, {}));
  files_.give(std::exchange(block.file, {}));
  files_.punch_holes();  // the disk may be full but for these
}

}  // namespace memsaver
