#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "backup/block.hpp"
#include "backup/digest_queue.hpp"
#include "backup/file_store.hpp"
#include "backup/host_pool.hpp"
#include "driver/driver.hpp"
#include "support/progress.hpp"

namespace memsaver {

// How much of the restored content is digested again and compared.
enum class Verify { off, sampled, full };

// A block whose content is to be kept or restored.
struct ContentBlock {
  enum class Outcome { none, copied, unchanged, zero };

  std::string tag;
  Address base = 0;          // of its allocation
  Block* block = nullptr;    // lives until the operation ends
  std::vector<Extent> live;  // content now (keeping only)
  bool to_file = false;      // keep in the file store rather than in host memory
  Outcome outcome = Outcome::none;

  [[nodiscard]] Address begin() const { return base + block->offset; }
  [[nodiscard]] Address end() const { return begin() + block->bytes; }
};

// One physical handle's range.
struct ChunkRange {
  std::string tag;
  Address address;
  std::size_t bytes;
  bool zero = false;  // restoring: owed zeros
};

// Seconds of work by kind; kinds overlap each other.
struct PipelineSeconds {
  double host_memory = 0;  // waiting for pinned memory
  double digest = 0;       // waiting for digests
  double copy = 0;         // waiting for copies and files
  double driver = 0;       // mapping and unmapping

  // Kind by kind the longer of both: what side by side takes.
  void raise_to(const PipelineSeconds& other) {
    host_memory = std::max(host_memory, other.host_memory);
    digest = std::max(digest, other.digest);
    copy = std::max(copy, other.copy);
    driver = std::max(driver, other.driver);
  }
};

// Moves the content of one device's chunks to its backups and back, copies beside driver calls: on release chunk i is
// given up while chunk i + 1 is copied, on resume chunk i + 1 is mapped while chunk i is copied. One operation at a
// time uses it. Nothing may be running on the device that touches the content.
class Pipeline {
 public:
  Pipeline(Driver& driver, int device, HostPool& pool, FileStore& files, const DigestKey& key, Progress& progress);
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;
  ~Pipeline();

  // Keeps the content of `blocks`, calling drop(i) for chunk i once all content in it is kept. Blocks and chunks are
  // in address order. A block whose content equals its backup is not copied, one of zeros needs no memory.
  // When this throws, each block is either kept, or marked as not kept and all of its chunks not dropped; no copy is
  // under way any more.
  PipelineSeconds save(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                       const std::function<void(std::size_t)>& drop);

  // Calls acquire(i) for each chunk in turn and restores each block as soon as all chunks under it are there. `blocks`
  // are in address order, and so are the chunks under them. When this throws (ErrorKind::backup: content differs from
  // its digest), every backup is as it was and nothing is under way any more.
  PipelineSeconds restore(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                          const std::function<void(std::size_t)>& acquire, Verify verify);

 private:
  struct FileTransfer {
    std::shared_future<void> done;
    std::vector<HostRange> bounce;
  };
  struct Pending;

  void destroy_stream(Stream stream) noexcept;
  bool can_digest();
  void copy(bool to_host, Address base, const std::vector<Extent>& extents, const std::vector<HostRange>& memory);
  void keep(ContentBlock& content, std::size_t index, const Digest* digest, Pending& pending);
  void finish(Pending& pending, std::vector<ContentBlock>& blocks, const std::function<void(std::size_t)>& drop);
  bool ready(Pending& pending);
  std::vector<HostRange> take_bounce(std::size_t bytes);
  void limit_transfers(std::size_t count);
  void wait_for_streams();
  void give_transfers();
  void settle() noexcept;
  void quiesce() noexcept;
  void release_memory(Block& block);

  Driver& driver_;
  const int device_;
  HostPool& pool_;
  FileStore& files_;
  const DigestKey key_;
  Progress& progress_;
  Stream copies_;   // copy engine
  Stream kernels_;  // digests and zeros
  std::unique_ptr<DigestQueue> digests_;
  std::list<FileTransfer> transfers_;  // oldest first
  PipelineSeconds seconds_;
};

}  // namespace memsaver
