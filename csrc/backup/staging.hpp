#pragma once

#include <cstddef>
#include <future>
#include <list>
#include <memory>
#include <vector>

#include "backup/block.hpp"
#include "backup/digest_queue.hpp"
#include "backup/file_store.hpp"
#include "backup/host_pool.hpp"
#include "backup/packing.hpp"
#include "backup/shared_store.hpp"
#include "driver/driver.hpp"
#include "support/sizes.hpp"

namespace memsaver {

// A window is the content that is digested at once.
inline constexpr std::size_t kLargestWindow = 1024 * kSizeUnit;
// Blocks on the way to or from the file at once, each with bounce memory of its own.
inline constexpr std::size_t kFileTransfers = 8;

// A write to or read from the file under way in another thread.
struct FileTransfer {
  std::shared_future<void> done;
  std::vector<HostRange> bounce;  // HostPool::Use::passing
};
using FileTransfers = std::list<FileTransfer>;  // oldest first

// What SaveTask and RestoreTask share on one device: two streams, digests, copies of extents, and waiting for all of
// it.
class Staging {
 public:
  Staging(Driver& driver, int device, HostPool& pool, FileStore& files, SharedStore* store, const DigestKey& key,
          bool pack);
  // Waits until nothing is under way.
  ~Staging();

  [[nodiscard]] Driver& driver() { return driver_; }
  [[nodiscard]] int device() const { return device_; }
  [[nodiscard]] HostPool& pool() { return pool_; }
  [[nodiscard]] FileStore& files() { return files_; }
  [[nodiscard]] SharedStore* store() { return store_; }  // null if blocks are not shared
  [[nodiscard]] Packing& packing() { return packing_; }
  [[nodiscard]] Stream copies() const { return copies_; }    // runs on the copy engine
  [[nodiscard]] Stream kernels() const { return kernels_; }  // digests, packing and zero fills

  // Prepares digests() at the first call. False if the device cannot digest.
  [[nodiscard]] bool can_digest();
  // Only after can_digest() returned true.
  [[nodiscard]] DigestQueue& digests() { return *digests_; }

  enum class Direction { to_host, to_device };
  // Queues copies of extents of the allocation at `base`, which are contiguous in `memory`.
  void copy(Direction direction, Address base, const std::vector<Extent>& extents,
            const std::vector<HostRange>& memory);

  // Waits for what `stream` holds now.
  void wait_for(Stream stream);
  void wait_for_streams();

  // Waits until neither the device nor the threads of `transfers` work for this object, then returns their bounce
  // memory to the pool, and the memory for packing to the device.
  void settle(FileTransfers& transfers) noexcept;
  void give_bounce(FileTransfers& transfers);

 private:
  void destroy_stream(Stream stream) noexcept;

  Driver& driver_;
  const int device_;
  HostPool& pool_;
  FileStore& files_;
  SharedStore* const store_;
  const DigestKey key_;
  Stream copies_;
  Stream kernels_;
  std::unique_ptr<DigestQueue> digests_;
  Packing packing_;
};

}  // namespace memsaver
