#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "backup/block.hpp"
#include "support/mutex.hpp"
#include "support/range_set.hpp"

namespace memsaver {

// Returns whether files in `folder` take memory of the host: then more space may be reported than the machine has.
[[nodiscard]] bool is_in_memory(const std::string& folder);

// Owns the backups on disk: one file, deleted while open, so that nothing is left however the process ends; readable by
// its owner only. Unbuffered (O_DIRECT) if the file system supports it, so that backups do not displace the page cache.
// Any thread may call any function.
class FileStore {
 public:
  // Uses `folder` when space is first requested.
  explicit FileStore(std::string folder);
  FileStore(const FileStore&) = delete;
  FileStore& operator=(const FileStore&) = delete;
  ~FileStore();

  // Throws disk_full if the file system has less than `bytes` available, configuration if no file can be made in the
  // folder, backup if the system refuses to say.
  void check(std::size_t bytes);

  // Uses another folder from now on. Returns false, and does nothing, while space in the present one is in use.
  [[nodiscard]] bool move_to(const std::string& folder);
  // Hands out a range of `bytes`, rounded up to pages. Throws as check(), without regard to the space: nothing is
  // taken.
  [[nodiscard]] FileRange take(std::size_t bytes);
  // Takes a range back; the next punch_holes() gives it to the file system. Makes no system call.
  void give(const FileRange& range);
  // May wait for the file system: do not call it with a lock held.
  void punch_holes();

  // Transfer a range that is handed out, and wait for it. `memory` must be page-aligned and as large as the range.
  // Throw disk_full or backup (any other failure, a truncated file included): a part is transferred.
  void write(const FileRange& range, const std::vector<HostRange>& memory);
  void read(const FileRange& range, const std::vector<HostRange>& memory);

  // Returns the bytes that are handed out. Never waits for the file system.
  [[nodiscard]] std::size_t used_bytes() const noexcept { return used_; }

 private:
  void open() REQUIRES(file_mutex_);
  // Calls pread(2) or pwrite(2) until all is transferred. False if a call transfers nothing.
  template <typename Call>
  [[nodiscard]] bool transfer(const char* name, const Call& call, const FileRange& range,
                              const std::vector<HostRange>& memory);

  Mutex file_mutex_ ACQUIRED_BEFORE(mutex_);  // held while a file is opened
  std::string folder_ GUARDED_BY(file_mutex_);
  int file_ GUARDED_BY(file_mutex_) = -1;

  Mutex mutex_;                                           // never held across a system call
  RangeSet free_ GUARDED_BY(mutex_);                      // holes below end_
  std::vector<FileRange> given_back_ GUARDED_BY(mutex_);  // no hole punched yet
  std::size_t end_ GUARDED_BY(mutex_) = 0;
  std::atomic<std::size_t> used_{0};
};

}  // namespace memsaver
