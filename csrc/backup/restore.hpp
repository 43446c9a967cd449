#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <vector>

#include "backup/content.hpp"
#include "backup/staging.hpp"
#include "support/progress.hpp"

namespace memsaver {

// One Pipeline::restore(): acquires chunk after chunk, and copies and verifies blocks as soon as they are mapped.
class RestoreTask {
 public:
  RestoreTask(Staging& staging, Progress& progress, std::vector<ContentBlock>& blocks,
              const std::vector<ChunkRange>& chunks, const std::function<void(std::size_t)>& acquire, Verify verify);
  RestoreTask(const RestoreTask&) = delete;
  RestoreTask& operator=(const RestoreTask&) = delete;

  // Call it once.
  PipelineSeconds run();

 private:
  // Bounce memory on its way to the device; free once `event` has passed.
  struct Landing {
    std::vector<HostRange> bounce;
    std::optional<Event> event;
  };

  void acquire_chunk(std::size_t index);
  void fill_zero(const ChunkRange& chunk);
  void restore_below(Address mapped);
  void restore_block(std::size_t index);
  void restore_from_file(const ContentBlock& content);
  void read_ahead();
  bool read_block(const Block& block);
  void land(std::size_t keep);
  [[nodiscard]] bool is_checked(const Block& block);
  void add_to_window(std::size_t index);
  void submit_window();
  void check_oldest_window();
  void finish();

  Staging& staging_;
  Driver& driver_;
  const int device_;
  Progress& progress_;
  std::vector<ContentBlock>& blocks_;
  const std::vector<ChunkRange>& chunks_;
  const std::function<void(std::size_t)>& acquire_;
  const Verify verify_;
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
};

}  // namespace memsaver
