#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "backup/content.hpp"
#include "backup/staging.hpp"
#include "support/progress.hpp"

namespace memsaver {

// Moves the content of one device's chunks to its backups and back. Copies overlap driver calls: a save drops chunk i
// while chunk i + 1 is copied, a restore maps chunk i + 1 while chunk i is copied.
//
// One operation at a time may use it, and nothing else on the device may touch the content meanwhile. The destructor
// waits until nothing is under way.
class Pipeline {
 public:
  Pipeline(Driver& driver, int device, HostPool& pool, FileStore& files, const DigestKey& key, Progress& progress);

  // Saves the content of `blocks`, and calls drop(i) for chunk i once all content in it is saved. Both are in address
  // order. A block whose content equals its backup is not copied; one of zeros needs no memory.
  // When it throws, each block is either kept, or marked as not kept with none of its chunks dropped; nothing is under
  // way.
  PipelineSeconds save(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                       const std::function<void(std::size_t)>& drop);

  // Calls acquire(i) for each chunk in turn, and restores each block as soon as all chunks under it are mapped.
  // `blocks` are in address order, and so are the chunks under them.
  // When it throws (ErrorKind::backup: content differs from its digest), every backup is as it was; nothing is under
  // way.
  PipelineSeconds restore(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                          const std::function<void(std::size_t)>& acquire, Verify verify);

 private:
  Staging staging_;
  Progress& progress_;
};

}  // namespace memsaver
