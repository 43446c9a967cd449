#pragma once

#include <array>
#include <deque>

#include "backup/block.hpp"
#include "driver/handles.hpp"

namespace memsaver {

// A digest of `extents` of the allocation at `base`.
struct DigestJob {
  Address base;
  const std::vector<Extent>* extents;
};

// Owns the digests under way on a device: several batches, collected in the order they came. One thread at a time.
class DigestQueue {
 public:
  // Bytes for each CUDA thread block. With 256 KiB a few dozen MiB of content occupy the whole device, and the table of
  // items stays small: 24 bytes each, which the device reads from host memory.
  inline static const std::size_t kItemBytes = std::max<std::size_t>(kSizeUnit / 4, 4096);
  static constexpr std::size_t kSlotItems = 8192;
  inline static const std::size_t kSlotBytes = kSlotItems * kItemBytes;  // 2 GiB
  static constexpr std::size_t kSlots = 3;

  // Jobs that are digested at once.
  class Batch {
   public:
    // Adds a job, and returns true, unless the batch would exceed `bytes` or kSlotItems items; the first always fits.
    [[nodiscard]] bool add(const DigestJob& job, std::size_t bytes) {
      const std::size_t all_bytes = bytes_ + sum_of(*job.extents);
      std::size_t items = items_;
      for (const auto& extent : *job.extents) items += (extent.bytes + kItemBytes - 1) / kItemBytes;
      if (!jobs_.empty() && (all_bytes > bytes || items > kSlotItems)) return false;
      jobs_.push_back(job);
      bytes_ = all_bytes;
      items_ = items;
      return true;
    }
    [[nodiscard]] const std::vector<DigestJob>& jobs() const { return jobs_; }

   private:
    std::vector<DigestJob> jobs_;
    std::size_t bytes_ = 0;
    std::size_t items_ = 0;
  };

  // Throws out_of_host_memory or driver errors.
  DigestQueue(Driver& driver, int device, const DigestKey& key, Stream stream)
      : driver_(driver), device_(device), key_(key), stream_(stream), slots_(driver) {
    for (auto& slot : *slots_) idle_.push_back(&slot);
  }
  ~DigestQueue() { abandon(); }

  [[nodiscard]] bool full() const { return batches_.size() == kSlots; }
  [[nodiscard]] bool empty() const { return batches_.empty(); }

  // Starts to digest a batch of at most kSlotItems items. Only while not full(); the extents must live until it is
  // collected. Throws driver errors: nothing is under way for it.
  void submit(const std::vector<DigestJob>& jobs) {
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
  // Removes the oldest batch, waits for it, returns the digests of its jobs. Not while empty(). Throws driver errors.
  [[nodiscard]] std::vector<Digest> collect() {
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
  // Waits for all batches and discards their results.
  void abandon() noexcept {
    while (!batches_.empty()) attempt("while waiting for a digest to discard", [this] { (void)collect(); });
  }

 private:
  struct Slot {
    DigestItem items[kSlotItems];
    Digest results[kSlotItems];
  };
  struct Submitted {
    Slot* slot;
    std::vector<std::size_t> ends;  // of each job, in items
    Recorded digested;
  };

  Driver& driver_;
  const int device_;
  const DigestKey key_;
  const Stream stream_;
  const Registered<std::array<Slot, kSlots>> slots_;
  std::vector<Slot*> idle_;
  std::deque<Submitted> batches_;
};

}  // namespace memsaver
