#include "backup/digest_windows.hpp"

#include <utility>

namespace memsaver {

// At least one block, and no more than a batch of digests holds.
void DigestWindows::submit() {
  if (next_ == blocks_.size()) return;
  Window window{next_, next_, {}};
  std::size_t bytes = 0;
  std::size_t items = 0;
  std::vector<DigestJob> jobs;
  for (; window.end < blocks_.size(); ++window.end) {
    const ContentBlock& content = blocks_[window.end];
    bytes += sum_of(content.live);
    items += DigestQueue::items_of(content.live);
    if (!jobs.empty() && (bytes > bytes_ || items > DigestQueue::kSlotItems)) break;
    jobs.push_back({content.base, &content.live});
  }
  bytes_ = std::min(2 * bytes_, kLargestWindow);
  next_ = window.end;
  if (digesting_) staging_.digests().submit(jobs);
  submitted_.push_back(std::move(window));
}

DigestWindows::Window DigestWindows::collect() {
  Window window = std::move(submitted_.front());
  submitted_.pop_front();
  window.digests.resize(window.end - window.begin);
  if (!digesting_) return window;
  const Stopwatch watch(seconds_.digest);
  const std::vector<Digest> digests = staging_.digests().collect();
  std::copy(digests.begin(), digests.end(), window.digests.begin());
  return window;
}

}  // namespace memsaver
