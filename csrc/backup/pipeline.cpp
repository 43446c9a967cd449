#include "backup/pipeline.hpp"

#include "backup/restore.hpp"
#include "backup/save.hpp"

namespace memsaver {

Pipeline::Pipeline(Driver& driver, int device, HostPool& pool, FileStore& files, const DigestKey& key,
                   Progress& progress)
    : staging_(driver, device, pool, files, key), progress_(progress) {}

PipelineSeconds Pipeline::save(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                               const std::function<void(std::size_t)>& drop) {
  return SaveTask(staging_, progress_, blocks, chunks, drop).run();
}

PipelineSeconds Pipeline::restore(std::vector<ContentBlock>& blocks, const std::vector<ChunkRange>& chunks,
                                  const std::function<void(std::size_t)>& acquire, Verify verify) {
  return RestoreTask(staging_, progress_, blocks, chunks, acquire, verify).run();
}

}  // namespace memsaver
