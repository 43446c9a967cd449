#pragma once

#include <cstddef>
#include <future>
#include <vector>

#include "backup/block.hpp"
#include "backup/pipeline.hpp"
#include "backup/staging.hpp"

namespace memsaver {

// Copies from a device to the backup file, each by way of bounce memory and with a thread that writes. Bounds how many
// are under way.
class FileWrites {
 public:
  // Adds the time spent waiting to `seconds`.
  FileWrites(Staging& staging, PipelineSeconds& seconds) : staging_(staging), seconds_(seconds) {}

  // Starts to copy extents of the device memory at `base` to `range`, which is as large, rounded up to pages. What is
  // under way when this throws is among transfers(). The copy of the content has ended when `copies` of the staging has
  // passed it, the write when the result is ready.
  [[nodiscard]] std::shared_future<void> start(const FileRange& range, Address base,
                                               const std::vector<Extent>& extents);
  [[nodiscard]] FileTransfers& transfers() { return transfers_; }

 private:
  [[nodiscard]] std::vector<HostRange> take_bounce(std::size_t bytes);
  void limit(std::size_t count);

  Staging& staging_;
  PipelineSeconds& seconds_;
  FileTransfers transfers_;
};

}  // namespace memsaver
