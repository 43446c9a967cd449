#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "backup/pipeline.hpp"

namespace memsaver {

// What an operation did to one tag.
struct TagOutcome {
  std::string tag;
  std::string restore;  // the restore policy, "mixed" if the tag has several
  std::string state;    // resident or released
  std::size_t bytes = 0;
  std::size_t released_bytes = 0;
  std::size_t resumed_bytes = 0;
  std::size_t backed_up_bytes = 0;
  std::size_t unchanged_bytes = 0;
  std::size_t zero_bytes = 0;
  std::size_t restored_bytes = 0;
  bool already = true;  // there was nothing to do
};

struct OperationResult {
  std::vector<TagOutcome> tags;
  std::vector<int> devices;  // that were worked on
  double seconds = 0;
  PipelineSeconds work;  // the slowest device's
  // Release: until the first 64 MiB (or everything, if less) were back with the driver, on the slowest device.
  double first_memory_seconds = 0;
};

}  // namespace memsaver
