#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <vector>

#include "backup/block.hpp"
#include "backup/handles.hpp"
#include "driver/driver.hpp"
#include "support/sizes.hpp"

namespace memsaver {

// A digest of `extents` of the allocation at `base`.
struct DigestJob {
  Address base;
  const std::vector<Extent>* extents;
};

// Digests on a device: several batches under way at once, results in the order of submission. One thread at a time.
class DigestQueue {
 public:
  // Bytes per CUDA thread block: 256 KiB fill the device from a few dozen MiB on, and keep the table of items small
  // (24 bytes each, which the device reads from host memory).
  static constexpr std::size_t kItemBytes = std::max<std::size_t>(kSizeUnit / 4, 4096);
  static constexpr std::size_t kSlotItems = 2048 * kSizeUnit / kItemBytes;  // 2 GiB in whole items
  static constexpr std::size_t kSlots = 3;

  DigestQueue(Driver& driver, int device, const DigestKey& key, Stream stream)
      : driver_(driver), device_(device), key_(key), stream_(stream), slots_(driver) {
    for (auto& slot : slots_->slot) idle_.push_back(&slot);
  }
  DigestQueue(const DigestQueue&) = delete;
  DigestQueue& operator=(const DigestQueue&) = delete;
  ~DigestQueue() { abandon(); }

  // Items of a job. A batch may have kSlotItems in total.
  [[nodiscard]] static std::size_t items_of(const std::vector<Extent>& extents);
  [[nodiscard]] bool full() const { return batches_.size() == kSlots; }
  [[nodiscard]] bool empty() const { return batches_.empty(); }

  // Only while not full(). The job's extents must live until it is collected.
  void submit(const std::vector<DigestJob>& jobs);
  // Waits for the oldest batch and returns its digests. Only while not empty(). Removes the batch also when it throws.
  [[nodiscard]] std::vector<Digest> collect();
  // Waits for all batches and discards their results.
  void abandon() noexcept;

 private:
  struct Slot {
    DigestItem items[kSlotItems];
    Digest results[kSlotItems];
  };
  struct Slots {
    Slot slot[kSlots];
  };
  struct Batch {
    Slot* slot;
    std::vector<std::size_t> ends;  // of each job, in items
    Recorded digested;
  };

  Driver& driver_;
  const int device_;
  const DigestKey key_;
  const Stream stream_;
  const Registered<Slots> slots_;
  std::vector<Slot*> idle_;
  std::deque<Batch> batches_;
};

}  // namespace memsaver
