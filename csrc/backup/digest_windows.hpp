#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <vector>

#include "backup/pipeline.hpp"
#include "backup/staging.hpp"

namespace memsaver {

// The blocks of a save in windows, each digested while the one before it is saved.
class DigestWindows {
 public:
  struct Window {
    std::size_t begin, end;                      // blocks
    std::vector<std::optional<Digest>> digests;  // of them; none if the device cannot digest
  };

  // Adds the time spent waiting for digests to `seconds`.
  DigestWindows(Staging& staging, const std::vector<ContentBlock>& blocks, PipelineSeconds& seconds)
      : staging_(staging), blocks_(blocks), seconds_(seconds) {}

  void begin() { digesting_ = staging_.can_digest(); }
  // Starts to digest the next window, if there is one.
  void submit();
  [[nodiscard]] bool empty() const { return submitted_.empty(); }
  // The oldest window that was submitted, digested.
  [[nodiscard]] Window collect();

 private:
  // Windows grow: a small first one returns memory early (64 MiB cross a 55 GB/s link in 1.2 ms), large ones keep every
  // multiprocessor busy.
  static constexpr std::size_t kFirstWindow = 64 * kSizeUnit;

  Staging& staging_;
  const std::vector<ContentBlock>& blocks_;
  PipelineSeconds& seconds_;
  bool digesting_ = false;
  std::size_t next_ = 0;  // block of the next window
  std::size_t bytes_ = kFirstWindow;
  std::deque<Window> submitted_;
};

}  // namespace memsaver
