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
// Memory comes in slices, made by several threads side by side: mapped, huge pages advised, on the NUMA node of the
// device, touched. Registering a slice holds a lock of the CUDA driver that copies and unmaps need too, so it is done
// by one thread at a time: while an operation waits for memory by the taker itself, between its copies (on an H200 the
// first release of 16 GiB ran at 26 to 32 GB/s with registrations from 6 to 16 other threads), otherwise by the makers.
// One copy may not span two slices, so no range that is handed out does.
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

  // Grows in the background until `bytes` could be handed out beyond what is now, where the machine has that much.
  // Returns at once; a failure reaches those who wait in take().
  void start_growth(std::size_t bytes);
  // Returns when no growth is under way. Throws what stopped the last one.
  void wait_for_growth();

  // While one of these lives, takers register slices themselves.
  class Urgent {
   public:
    explicit Urgent(HostPool& pool) : pool_(pool) { pool_.set_urgent(1); }
    Urgent(const Urgent&) = delete;
    Urgent& operator=(const Urgent&) = delete;
    ~Urgent() { pool_.set_urgent(-1); }

   private:
    HostPool& pool_;
  };

  enum class Use {
    backup,   // within the limit
    passing,  // on the way to or from a file: where the limit has room besides, and backups do not have to wait for it
    must_pass,  // the same, whatever the limit says: without it what lies in the file could not be brought back
  };

  // Ranges of `bytes` in all (rounded up to pages), waiting for a growth under way, and growing where none is. Their
  // content is undefined, but what the last page has beyond `bytes` is zero: once they are written, nothing is left of
  // whoever had them before. Throws ErrorKind::out_of_host_memory, with nothing taken.
  [[nodiscard]] std::vector<HostRange> take(std::size_t bytes, Use use = Use::backup);
  void give(const std::vector<HostRange>& ranges, Use use = Use::backup);

  // Unpins and unmaps every slice that is not in use; what the driver does not unpin stays, with a warning.
  void trim();

  [[nodiscard]] HostPoolStatus status() const;

 private:
  struct Slice {
    std::size_t bytes;
    std::size_t used_bytes = 0;
  };
  struct Touched {
    std::uintptr_t address;
    std::size_t bytes;
  };
  [[nodiscard]] Touched make_slice(std::size_t bytes) const;
  void grow_to(std::size_t capacity);
  void grow();
  void stop_growth();
  void set_urgent(int change);
  bool register_one(std::unique_lock<std::mutex>& lock);
  void add_slice(const Touched& slice);

  Driver& driver_;
  const std::size_t limit_;
  const int numa_node_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uintptr_t, Slice> slices_;
  std::map<std::uintptr_t, RangeSet> free_;  // by slice, so that ranges of neighbouring slices never merge
  std::size_t used_ = 0;
  std::size_t passing_ = 0;  // of these, what is on the way to or from files
  std::size_t capacity_ = 0;
  std::size_t target_ = 0;
  std::vector<Touched> touched_;  // slices that only lack their registration
  std::size_t under_way_ = 0;     // bytes of slices that are being made, touched or being registered
  bool registering_ = false;
  int urgent_ = 0;
  std::size_t growers_ = 0;  // threads at work
  bool stop_ = false;
  std::exception_ptr growth_failure_;
  std::vector<std::thread> threads_;
};

}  // namespace memsaver
