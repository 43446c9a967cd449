#pragma once

#include <list>

#include "backup/block.hpp"
#include "backup/digest_queue.hpp"
#include "backup/file_store.hpp"
#include "backup/host_pool.hpp"
#include "backup/packing.hpp"
#include "backup/shared_store.hpp"
#include "support/progress.hpp"

namespace memsaver {

// A window is the content that is digested at once.
inline const std::size_t kLargestWindow = 1024 * kSizeUnit;
// Blocks on the way through bounce memory at once: to or from the file, or from the shared store.
inline constexpr std::size_t kTransfers = 8;

// How much of the restored content is digested again and compared; `automatic` is full if the device digests far faster
// than it copies, else sampled.
enum class VerifyChoice { off, sampled, full, automatic };

// A block whose content is to be saved or restored.
struct ContentBlock {
  enum class Outcome { none, copied, unchanged, zero, found };  // found: in the shared store

  std::string tag;
  Address base = 0;          // of its allocation
  Block* block = nullptr;    // outlives the operation
  std::vector<Extent> live;  // its content now (for a save)
  bool to_file = false;      // save to the file store instead of host memory
  Outcome outcome = Outcome::none;

  [[nodiscard]] Address begin() const { return base + block->offset; }
  [[nodiscard]] Address end() const { return begin() + block->bytes; }
  // Returns the first of `live`, which in a block that can be packed is the only one.
  [[nodiscard]] PackItem first_run() const { return {base + live.front().offset, live.front().bytes}; }
};

// The address range of one physical handle.
struct ChunkRange {
  std::string tag;
  Address address;
  std::size_t bytes;
  bool zero = false;  // a restore fills it with zeros

  [[nodiscard]] Address end() const { return address + bytes; }
  [[nodiscard]] bool contains(const ContentBlock& content) const {
    return address <= content.begin() && content.end() <= end();
  }
};

// Seconds of work by kind. Kinds overlap.
struct PipelineSeconds {
  double host_memory = 0;  // waiting for pinned memory
  double digest = 0;       // waiting for digests
  double copy = 0;         // waiting for copies and files
  double driver = 0;       // mapping and unmapping

  // Takes the larger value of each kind: the time of devices that work in parallel.
  void raise_to(const PipelineSeconds& other) {
    host_memory = std::max(host_memory, other.host_memory);
    digest = std::max(digest, other.digest);
    copy = std::max(copy, other.copy);
    driver = std::max(driver, other.driver);
  }
};

// A write to or a read from the file, or a read of the shared store, that another thread does.
struct FileTransfer {
  const Block* block = nullptr;  // that is read
  std::shared_future<void> done;
  std::unique_ptr<HostPool::Bounce> bounce;
  Recorded copied;  // of a read: `bounce` is in use until this event
};
using FileTransfers = std::list<FileTransfer>;  // oldest first

// What a pipeline works with, and does not own.
struct PipelineParts {
  Driver& driver;
  const int device;
  HostPool& pool;
  FileStore& files;
  SharedStore* const store;  // null if blocks are not shared
  const DigestKey key;
  Progress& progress;
};

// Owns the streams and buffers that move the content of one device's chunks to its backups and back. Copies overlap
// driver calls: a save drops chunk i while chunk i + 1 is copied, a restore maps chunk i + 1 while chunk i is copied.
//
// One operation at a time may use it, and nothing else on the device may touch the content meanwhile. The operations
// throw driver errors, out_of_host_memory, backup and what their callbacks throw.
class Pipeline : public PipelineParts {
 public:
  // Throws driver errors.
  Pipeline(const PipelineParts& parts, bool pack) : PipelineParts(parts), packing(driver, device, pack) {}
  // Waits until nothing is under way.
  ~Pipeline() { quiesce(); }

  // Saves the content of `blocks`, and calls drop(i) for chunk i once all content in it is saved. Both are in address
  // order. A block whose content equals its backup is not copied; one of zeros needs no memory. Throws as above: each
  // block is either kept, or marked as not kept with none of its chunks dropped; nothing is under way.
  PipelineSeconds save(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                       const std::function<void(std::size_t)>& drop);

  // Samples resident blocks without a backup, in save()'s order, and notes what one will take. Throws driver errors.
  void expect(std::vector<ContentBlock>& blocks);

  // Calls acquire(i) once for each chunk, and restores the blocks in it. Both are in address order on entry, and no
  // block is in two chunks. Packed content comes first: other chunks, acquired while it is copied, lend their memory
  // for unpacking until their own content comes. `verify` is not `automatic`. Throws as above (backup also if content
  // differs from its digest): every backup is as it was; nothing is under way.
  PipelineSeconds restore(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                          const std::function<void(std::size_t)>& acquire, VerifyChoice verify);

  // What follows is for save(), expect() and restore() alone.

  const OwnStream copies{driver, device};   // runs on the copy engine
  const OwnStream kernels{driver, device};  // digests, packing, zero fills and samples of zeros
  Packing packing;
  // Words of new device memory, made when first needed, and whether all that were seen so far were zero.
  static constexpr std::size_t kSamples = 4096;
  using Samples = Registered<std::array<std::uint64_t, kSamples>>;
  std::unique_ptr<Samples> samples;
  bool new_memory_is_zero = true;

  // Returns null if the device cannot digest. Throws as DigestQueue().
  [[nodiscard]] DigestQueue* digests() {
    if (!driver.has_digest(device)) return nullptr;
    if (!digests_) digests_ = std::make_unique<DigestQueue>(driver, device, key, kernels);
    return digests_.get();
  }

  enum class Direction { to_host, to_device };
  // Queues copies of extents of the allocation at `base`, which lie one after the other in `memory`. Throws driver
  // errors: some may be queued.
  void copy(Direction direction, Address base, const std::vector<Extent>& extents,
            const std::vector<HostRange>& memory) {
    for_each_piece(extents, memory, [&](std::size_t offset, std::uintptr_t address, std::size_t bytes) {
      auto* const host_address = reinterpret_cast<void*>(address);
      if (direction == Direction::to_host) {
        driver.copy_to_host(device, host_address, base + offset, bytes, copies);
      } else {
        driver.copy_to_device(device, base + offset, host_address, bytes, copies);
      }
    });
  }
  // Returns bounce memory for a file transfer; null if there is too little until other transfers give theirs back. One
  // that is `alone` exceeds the limit instead. Throws as HostPool::take().
  [[nodiscard]] std::unique_ptr<HostPool::Bounce> bounce(std::size_t bytes, bool alone) {
    try {
      const auto use = alone ? HostPool::Use::must_pass : HostPool::Use::passing;
      return std::make_unique<HostPool::Bounce>(pool, bytes, use);
    } catch (const Error& error) {
      if (alone || error.kind != ErrorKind::out_of_host_memory) throw;
      return nullptr;
    }
  }
  // Returns an event after what `copies` or `kernels` holds now. Throws driver errors.
  [[nodiscard]] Recorded record(Stream stream) { return std::make_shared<RecordedEvent>(driver, device, stream); }
  // Throws driver errors.
  void wait_for_streams() {
    record(copies)->wait();
    record(kernels)->wait();
  }
  // Waits until nothing works for this object, `transfers` included, and closes `packing`. What fails is logged.
  void quiesce(const FileTransfers& transfers = {}) noexcept {
    for (const auto& transfer : transfers) {
      if (transfer.done.valid()) transfer.done.wait();
    }
    if (digests_) digests_->abandon();
    if (!attempt("while waiting for copies to end", [this] { wait_for_streams(); })) {
      // A device that cannot be synchronized, either, has lost its context and runs nothing.
      attempt("while waiting for the device", [this] { driver.synchronize(device); });
    }
    try {
      packing.close();
    } catch (const std::exception&) {
      // The context is lost, and the device's memory with it.
    }
  }

 private:
  std::unique_ptr<DigestQueue> digests_;
};

}  // namespace memsaver
