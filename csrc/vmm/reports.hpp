#pragma once

#include "backup/pipeline.hpp"

namespace memsaver {

struct TagSnapshot {
  std::string tag;
  std::string restore;  // the restore policy, "mixed" if the tag has several
  std::string state;    // resident, released, releasing, resuming
  std::size_t bytes = 0;
  std::size_t resident_bytes = 0;
  std::size_t released_bytes = 0;
  std::size_t shrunk_bytes = 0;    // given back by a resize; no resume brings them back
  std::size_t retained_bytes = 0;  // mapped, but in no live allocation
  std::size_t backed_up_bytes = 0;
  std::size_t kept_bytes = 0;           // what these backups take: less if they are packed, nothing for zeros
  std::size_t expected_bytes = 0;       // further host memory that a backup of all that is mapped is expected to take
  std::size_t expected_file_bytes = 0;  // likewise, of space in files if it is kept there
  std::size_t allocations = 0;
  std::size_t chunks = 0;
  std::map<int, std::size_t> mapped_by_device;  // retained bytes included
  std::map<int, std::size_t> bytes_by_device;   // live bytes, mapped or not
  std::map<int, std::size_t> shrunk_by_device;
};

struct SaverStatus {
  std::string state;    // resident, released, releasing, resuming, failed
  std::string failure;  // why the device context is lost; else empty
  std::vector<TagSnapshot> tags;
  std::map<int, std::size_t> reserved_by_device;  // for the next resume
  std::size_t backup_bytes = 0;                   // that backups take
  std::size_t file_bytes = 0;
  HostPoolStatus pool{};
  SharedStoreStatus shared;
  bool prepared = false;  // host memory for a release of everything is pinned
  std::string operation;  // release, resume, or empty
  std::size_t done_bytes = 0;
  std::size_t total_bytes = 0;
  std::size_t copied_bytes = 0;
  double operation_seconds = 0;
};

struct BackupView {
  std::string tag;
  Address allocation = 0;  // that the range is in
  std::size_t allocation_bytes = 0;
  bool released = false;         // some of the range has no memory now
  Kept kept = Kept::nothing;     // host: all of it is in host memory (zeros included); file: some of it is on disk
  const void* memory = nullptr;  // its address, if it is contiguous in host memory
};

// What the shared store has of a block: its offset in the allocation, its bytes, offset and bytes of each part that has
// content, and the digest (lane0, lane1, any).
using SavedBlock = std::tuple<std::size_t, std::size_t, std::vector<std::pair<std::size_t, std::size_t>>,
                              std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>;
// An allocation: its address, bytes and blocks.
using SavedAllocation = std::tuple<Address, std::size_t, std::vector<SavedBlock>>;

struct TagOutcome {
  std::string tag;
  std::string restore;  // the policy that it was released under, else its own; "mixed" if there are several
  std::string state;    // resident or released
  std::size_t bytes = 0;
  std::size_t released_bytes = 0;
  std::size_t resumed_bytes = 0;
  std::size_t backed_up_bytes = 0;
  std::size_t kept_bytes = 0;  // what the backups of these take: less if they are packed
  std::size_t unchanged_bytes = 0;
  std::size_t shared_bytes = 0;  // not copied: the shared store has the content from another process
  std::size_t zero_bytes = 0;
  std::size_t restored_bytes = 0;
  bool already = false;  // there was nothing to do
};

struct OperationResult {
  std::vector<TagOutcome> tags;
  double seconds = 0;
  PipelineSeconds work;  // the slowest device's
  // Release: until the first 64 MiB (or everything, if less) were back with the driver, on the slowest device.
  double first_memory_seconds = 0;
};

}  // namespace memsaver
