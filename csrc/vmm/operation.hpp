#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "backup/pipeline.hpp"
#include "driver/driver.hpp"
#include "support/progress.hpp"
#include "support/transaction.hpp"
#include "vmm/arena.hpp"

namespace memsaver {

struct TagOutcome {
  std::string tag;
  std::string restore;
  std::string state;
  std::size_t bytes = 0;
  std::size_t released_bytes = 0;
  std::size_t resumed_bytes = 0;
  std::size_t backed_up_bytes = 0;
  std::size_t unchanged_bytes = 0;
  std::size_t zero_bytes = 0;
  std::size_t restored_bytes = 0;
  bool already = true;
};

struct OperationResult {
  std::vector<TagOutcome> tags;
  std::vector<int> devices;  // that were worked on
  double seconds = 0;
  PipelineSeconds work;  // the slowest device's
  // Release: until the first 64 MiB (or all there was) were back with the driver, on the slowest device.
  double first_memory_seconds = 0;
};

// What an operation does on one device.
struct DeviceWork {
  struct Owned {
    Arena* arena;
    Chunk chunk;
    Restore restore = Restore::discard;  // what its live ranges are owed: releasing, from then on; resuming, now
  };
  int device = -1;
  std::vector<ContentBlock> blocks;               // content to keep or restore
  std::vector<Owned> kept;                        // chunks under content
  std::vector<Owned> others;                      // chunks whose content is not kept
  std::map<std::string, std::size_t> done_bytes;  // given back or mapped, by tag
  std::size_t freed_bytes = 0;
  double first_memory_seconds = 0;
  std::vector<Owned> acquired;
  Transaction transaction;
  PipelineSeconds seconds;

  // Puts blocks, and the chunks under them, in address order, as Pipeline wants them.
  void sort();
  // What an error names where no single tag is in work.
  [[nodiscard]] std::string tags() const;
  [[nodiscard]] std::size_t bytes() const;
};

// One release or resume: the arenas that are busy with it, and what it does on each device.
struct Operation {
  explicit Operation(Progress::Operation what) : kind(what) {}

  const Progress::Operation kind;
  const std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  std::vector<Arena*> arenas;
  std::map<int, DeviceWork> devices;  // by device; those with something to do
  std::size_t content_bytes = 0;      // to keep or restore

  [[nodiscard]] DeviceWork& on(int device);
  // Runs `run` for each device, side by side, and waits for all of them. Throws the first failure.
  void on_each_device(const std::function<void(DeviceWork&)>& run);

  [[nodiscard]] double seconds() const;
  // What came of it. Only while nothing else changes the arenas.
  [[nodiscard]] OperationResult result() const;
};

}  // namespace memsaver
