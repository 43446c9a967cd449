#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "backup/block.hpp"
#include "driver/driver.hpp"
#include "support/range_set.hpp"

namespace memsaver {

struct HostPoolStatus {
  std::size_t used_bytes;      // handed out
  std::size_t capacity_bytes;  // pinned and ready
  std::size_t target_bytes;    // what the growth under way leads to
  std::size_t limit_bytes;
};

// Pinned host memory in exactly the size that is asked for.
//
// Memory comes in slices of at most 256 MiB: mapped, huge pages advised, on the NUMA node of the device, touched by
// several threads, registered. While one slice is registered the next is touched; a taker waits for slices that are
// under way. One copy may not span two slices, so no range that is handed out does.
class HostPool {
 public:
  // `numa_node` of -1 leaves the placement to the kernel.
  HostPool(Driver& driver, std::size_t limit_bytes, int numa_node);
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;
  ~HostPool();

  // Throws ErrorKind::out_of_host_memory where `bytes` more than now handed out would pass the limit, or where the
  // machine does not have the part of them that is not pinned yet.
  void check(std::size_t bytes);

  // Grows in the background until `bytes` could be handed out beyond what is now. Returns at once; a failure reaches
  // those who wait in take().
  void start_growth(std::size_t bytes);
  void wait_for_growth();

  // Ranges of `bytes` in all (rounded up to pages), waiting for a growth under way, and growing where none is.
  // Throws ErrorKind::out_of_host_memory, with nothing taken.
  [[nodiscard]] std::vector<HostRange> take(std::size_t bytes);
  void give(const std::vector<HostRange>& ranges);

  // Unpins and unmaps every slice that is not in use. Returns the bytes.
  std::size_t trim();

  [[nodiscard]] HostPoolStatus status() const;

 private:
  struct Slice {
    std::size_t bytes;
    std::size_t used_bytes = 0;
  };
  struct Mapping {
    std::uintptr_t address = 0;
    std::size_t bytes = 0;
  };
  [[nodiscard]] Mapping map_touched(std::size_t bytes) const;
  void grow();
  void stop_growth();

  Driver& driver_;
  const std::size_t limit_;
  const int numa_node_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uintptr_t, Slice> slices_;
  std::map<std::uintptr_t, RangeSet> free_;  // by slice, so that ranges of neighbouring slices never merge
  std::size_t used_ = 0;
  std::size_t capacity_ = 0;
  std::size_t target_ = 0;
  bool growing_ = false;
  bool stop_ = false;
  std::exception_ptr growth_failure_;
  std::thread grower_;
};

}  // namespace memsaver
