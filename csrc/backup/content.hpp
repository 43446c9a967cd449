#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "backup/block.hpp"
#include "driver/driver.hpp"

namespace memsaver {

// How much of the restored content is digested again and compared.
enum class Verify { off, sampled, full };

// A block whose content is to be saved or restored.
struct ContentBlock {
  enum class Outcome { none, copied, unchanged, zero };

  std::string tag;
  Address base = 0;          // of its allocation
  Block* block = nullptr;    // outlives the operation
  std::vector<Extent> live;  // its content now (for a save)
  bool to_file = false;      // save to the file store instead of host memory
  Outcome outcome = Outcome::none;

  [[nodiscard]] Address begin() const { return base + block->offset; }
  [[nodiscard]] Address end() const { return begin() + block->bytes; }
};

// The address range of one physical handle.
struct ChunkRange {
  std::string tag;
  Address address;
  std::size_t bytes;
  bool zero = false;  // a restore fills it with zeros

  [[nodiscard]] Address end() const { return address + bytes; }
};

// Seconds of work by kind. Kinds overlap.
struct PipelineSeconds {
  double host_memory = 0;  // waiting for pinned memory
  double digest = 0;       // waiting for digests
  double copy = 0;         // waiting for copies and files
  double driver = 0;       // mapping and unmapping

  // The larger value of each kind: the time of devices that work in parallel.
  void raise_to(const PipelineSeconds& other) {
    host_memory = std::max(host_memory, other.host_memory);
    digest = std::max(digest, other.digest);
    copy = std::max(copy, other.copy);
    driver = std::max(driver, other.driver);
  }
};

}  // namespace memsaver
