#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

#include "backup/block.hpp"
#include "support/range_set.hpp"

namespace memsaver {

// Backups on disk: one file, unlinked while open, so that nothing is left however the process ends; readable by its
// owner only. Unbuffered (O_DIRECT) where the file system can, so that a backup does not push the page cache out.
class FileStore {
 public:
  // The folder is used when the first space is asked for.
  explicit FileStore(std::string folder);
  FileStore(const FileStore&) = delete;
  FileStore& operator=(const FileStore&) = delete;
  ~FileStore();

  // Throws ErrorKind::out_of_host_memory where the file system has less than `bytes` for us,
  // ErrorKind::configuration where no file can be made in the folder.
  void check(std::size_t bytes);

  // New backups go to another folder. False, with nothing done, where space in the present one is taken.
  [[nodiscard]] bool move_to(const std::string& folder);
  [[nodiscard]] FileRange take(std::size_t bytes);
  // The space is the store's again, and the file system's after the next punch_holes(). Calls no file system.
  void give(const FileRange& range);
  // May wait for the file system: call it with no lock held.
  void punch_holes();

  // Blocking; any thread. Throws ErrorKind::out_of_host_memory (disk full) or ErrorKind::backup (anything else, a
  // file that is shorter than it was included). `memory` must be page-aligned and as large as the range.
  void write(const FileRange& range, const std::vector<HostRange>& memory);
  void read(const FileRange& range, const std::vector<HostRange>& memory);

  // Never waits for the file system.
  [[nodiscard]] std::size_t used_bytes() const noexcept { return used_; }

 private:
  void open();

  std::mutex file_mutex_;  // guards which file it is; taken before mutex_, and held while one is opened
  std::string folder_;
  int file_ = -1;

  std::mutex mutex_;                   // guards what follows; never held across a call
  RangeSet free_;                      // holes below end_
  std::vector<FileRange> given_back_;  // and not punched out yet
  std::size_t end_ = 0;
  std::atomic<std::size_t> used_{0};
};

}  // namespace memsaver
