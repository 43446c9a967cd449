#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <vector>

#include "backup/block.hpp"
#include "driver/driver.hpp"
#include "driver/handles.hpp"
#include "support/sizes.hpp"

namespace memsaver {

// A digest of `extents` of the allocation at `base`.
struct DigestJob {
  Address base;
  const std::vector<Extent>* extents;
};

// Owns the digests that are under way on a device: several batches at once, with results in the order of submission.
// One thread at a time.
class DigestQueue {
 public:
  // Bytes per CUDA thread block: 256 KiB fill the device from a few dozen MiB on, and keep the table of items small
  // (24 bytes each, which the device reads from host memory).
  static constexpr std::size_t kItemBytes = std::max<std::size_t>(kSizeUnit / 4, 4096);
  static constexpr std::size_t kSlotItems = 2048 * kSizeUnit / kItemBytes;  // 2 GiB in whole items
  static constexpr std::size_t kSlots = 3;

  // Jobs that are digested at once.
  class Batch {
   public:
    // Adds a job, unless the batch would have more than `bytes` or kSlotItems items then; a first job always fits.
    // Returns whether it did.
    [[nodiscard]] bool add(const DigestJob& job, std::size_t bytes);
    [[nodiscard]] const std::vector<DigestJob>& jobs() const { return jobs_; }

   private:
    std::vector<DigestJob> jobs_;
    std::size_t bytes_ = 0;
    std::size_t items_ = 0;
  };

  // Throws out_of_host_memory or driver errors.
  DigestQueue(Driver& driver, int device, const DigestKey& key, Stream stream)
      : driver_(driver), device_(device), key_(key), stream_(stream), slots_(driver) {
    for (auto& slot : slots_->slot) idle_.push_back(&slot);
  }
  DigestQueue(const DigestQueue&) = delete;
  DigestQueue& operator=(const DigestQueue&) = delete;
  ~DigestQueue() { abandon(); }

  [[nodiscard]] bool full() const { return batches_.size() == kSlots; }
  [[nodiscard]] bool empty() const { return batches_.empty(); }

  // Starts to digest a batch. Only while not full(); the extents must live until it is collected. Throws driver errors:
  // nothing is under way for it.
  void submit(const std::vector<DigestJob>& jobs);
  // Waits for the oldest batch, removes it, and returns the digests of its jobs. Only while not empty(). Throws driver
  // errors: the batch is removed.
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
  struct Submitted {
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
  std::deque<Submitted> batches_;
};

}  // namespace memsaver
