#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "backup/block.hpp"
#include "backup/pipeline.hpp"
#include "backup/staging.hpp"
#include "support/error.hpp"

namespace memsaver {

// The packed content of one restore on its way back.
class Unpacking {
 public:
  // Adds the time spent waiting to `seconds`.
  Unpacking(Staging& staging, PipelineSeconds& seconds) : staging_(staging), seconds_(seconds) {}
  Unpacking(const Unpacking&) = delete;
  Unpacking& operator=(const Unpacking&) = delete;
  // Nothing may be under way.
  ~Unpacking();

  // Starts to unpack a block from `memory`, which must stay until the stream of copies has passed this. Without buffers
  // it is unpacked in host memory by several threads, and nothing is under way afterwards. Throws ErrorKind::backup
  // if this block or an earlier one is damaged.
  void bring(const ContentBlock& content, const std::vector<HostRange>& memory);
  // Waits for what is under way, and gives the device memory back. Throws as bring().
  void end();

 private:
  struct Block {
    const ContentBlock* content;
    Packing::Buffer* buffer;
  };
  void end_oldest();
  void unpack_on_host(const ContentBlock& content, const std::vector<HostRange>& memory);

  Staging& staging_;
  PipelineSeconds& seconds_;
  std::deque<Block> blocks_;  // under way
  std::vector<HostRange> bounce_;
  std::vector<unsigned char> unpacked_;
};

// Unpacks what lies in `memory`, with several threads if `threads` is more than 1. Returns false if it is not packed
// content of `bytes` bytes.
[[nodiscard]] bool unpack_ranges(const std::vector<HostRange>& memory, std::size_t packed_bytes, void* content,
                                 std::size_t bytes, std::size_t threads = 1);

// Notes that a block could not be restored, and adds what to do about it to the error.
void note_damage(const ContentBlock& content, Error& error);
// The same, with a new error that names the block.
[[nodiscard]] Error damaged_backup(const ContentBlock& content, const char* what);

}  // namespace memsaver
