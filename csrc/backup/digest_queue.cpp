#include "backup/digest_queue.hpp"

#include <utility>

#include "support/log.hpp"

namespace memsaver {

bool DigestQueue::Batch::add(const DigestJob& job, std::size_t bytes) {
  const std::size_t all_bytes = bytes_ + sum_of(*job.extents);
  std::size_t items = items_;
  for (const auto& extent : *job.extents) items += (extent.bytes + kItemBytes - 1) / kItemBytes;
  if (!jobs_.empty() && (all_bytes > bytes || items > kSlotItems)) return false;
  jobs_.push_back(job);
  bytes_ = all_bytes;
  items_ = items;
  return true;
}

void DigestQueue::submit(const std::vector<DigestJob>& jobs) {
  Submitted batch{idle_.back(), {}, {}};
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
  const Submitted batch = std::move(batches_.front());
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
