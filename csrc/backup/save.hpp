#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <future>
#include <optional>
#include <utility>
#include <vector>

#include "backup/content.hpp"
#include "backup/staging.hpp"
#include "support/progress.hpp"

namespace memsaver {

// One Pipeline::save(): digests windows of blocks, copies what changed, and drops chunks whose content is saved.
class SaveTask {
 public:
  SaveTask(Staging& staging, Progress& progress, std::vector<ContentBlock>& blocks,
           const std::vector<ChunkRange>& chunks, const std::function<void(std::size_t)>& drop);
  SaveTask(const SaveTask&) = delete;
  SaveTask& operator=(const SaveTask&) = delete;

  // Call it once.
  PipelineSeconds run();

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

  Window next_window();
  void submit_window();
  void save_window();
  void save_block(std::size_t index, const std::optional<Digest>& digest, Batch& batch);
  void copy_to_memory(const ContentBlock& content, std::size_t bytes);
  void copy_to_file(const ContentBlock& content, std::size_t bytes, Batch& batch);
  void add_chunks_below(Address saved, Batch& batch);
  bool is_ready(const Batch& batch);
  void finish_oldest();
  std::vector<HostRange> take_bounce(std::size_t bytes);
  void limit_transfers(std::size_t count);
  void give_memory(Block& block);

  Staging& staging_;
  Driver& driver_;
  const int device_;
  Progress& progress_;
  std::vector<ContentBlock>& blocks_;
  const std::vector<ChunkRange>& chunks_;
  const std::function<void(std::size_t)>& drop_;
  bool digesting_ = false;
  std::size_t next_block_ = 0;  // of the next window
  std::size_t window_bytes_;
  std::deque<Window> submitted_;
  std::size_t next_chunk_ = 0;
  std::deque<Batch> batches_;
  FileTransfers transfers_;
  PipelineSeconds seconds_;
};

}  // namespace memsaver
