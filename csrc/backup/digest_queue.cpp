#include "backup/digest_queue.hpp"

#include <utility>

#include "support/log.hpp"

namespace memsaver {

std::size_t DigestQueue::items_of(const std::vector<Extent>& extents) {
  std::size_t items = 0;
  for (const auto& extent : extents) items += (extent.bytes + kItemBytes - 1) / kItemBytes;
  return items;
}

void DigestQueue::submit(const std::vector<DigestJob>& jobs) {
  Batch batch{idle_.back(), {}, {}};
  std::size_t count = 0;
  for (const auto& job : jobs) {
    for (const auto& extent : *job.extents) {
      for (std::size_t at = 0; at < extent.bytes; at += kItemBytes) {
        batch.slot->items[count++] = {job.base + extent.offset + at, std::min(kItemBytes, extent.bytes - at),
                                      (extent.offset + at) / kDigestWord};
      }
    }
    batch.ends.push_back(count);
  }
  driver_.digest(device_, key_, batch.slot->items, count, batch.slot->results, stream_);
  batch.digested = std::make_shared<RecordedEvent>(driver_, device_, stream_);
  idle_.pop_back();
  batches_.push_back(std::move(batch));
}

std::vector<Digest> DigestQueue::collect() {
  const Batch batch = std::move(batches_.front());
  batches_.pop_front();
  idle_.push_back(batch.slot);
  batch.digested->wait();
  std::vector<Digest> digests;
  std::size_t at = 0;
  for (const std::size_t end : batch.ends) {
    Digest sum;
    for (; at < end; ++at) sum += batch.slot->results[at];
    digests.push_back(sum);
  }
  return digests;
}

void DigestQueue::abandon() noexcept {
  while (!batches_.empty()) {
    try {
      (void)collect();
    } catch (const std::exception& error) {
      warn(std::string("while waiting for a digest to discard: ") + error.what());
    }
  }
}

}  // namespace memsaver
