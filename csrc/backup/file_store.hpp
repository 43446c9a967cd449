#pragma once

#include <dirent.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <memory>

#include "backup/block.hpp"
#include "support/mutex.hpp"
#include "support/range_set.hpp"

namespace memsaver {

// Returns whether files in `folder` take memory of the host: then more space may be reported than the machine has.
[[nodiscard]] inline bool is_in_memory(const std::string& folder) {
  struct statfs about{};
  return statfs(folder.c_str(), &about) == 0 && (about.f_type == TMPFS_MAGIC || about.f_type == RAMFS_MAGIC);
}

// Owns the backups on disk: one file, deleted while open, so that nothing is left however the process ends. Only its
// owner can read it. O_DIRECT, if supported, keeps backups out of the page cache. Any thread may call any function.
class FileStore {
 public:
  // Uses `folder` when space is first requested.
  explicit FileStore(std::string folder) : folder_(std::move(folder)) {}
  ~FileStore() {
    if (file_ >= 0) close(file_);
  }

  // Throws disk_full if less than `bytes` are available, configuration if no file can be made in the folder, or backup.
  void check(std::size_t bytes) {
    punch_holes();
    const Lock lock(file_mutex_);
    open();
    struct statvfs status{};
    if (sys::fstatvfs(file_, &status) != 0) throw failure("fstatvfs", errno, bytes);
    std::size_t free = static_cast<std::size_t>(status.f_bavail) * status.f_frsize;
    if (is_in_memory(folder_)) free = std::min(free, available_memory_bytes(bytes));
    if (bytes > free) {
      throw Error(ErrorKind::disk_full, "the file system of " + folder_ + " has too little space for the backup")
          .with_memory(bytes, free)
          .with_advice("free disk space or set MEMSAVER_FILE_DIR to a larger file system");
    }
  }

  // Uses another folder from now on. Returns false, and does nothing, while space in the present one is in use.
  [[nodiscard]] bool move_to(const std::string& folder) {
    const Lock lock(file_mutex_);
    if (folder == folder_) return true;
    if (used_ > 0) return false;
    if (file_ >= 0) close(file_);
    file_ = -1;
    folder_ = folder;
    const Lock ranges(mutex_);
    end_ = 0;
    free_ = {};
    given_back_.clear();
    return true;
  }
  // Hands out a range of `bytes`, rounded up to pages, whether or not there is space. Throws as check().
  [[nodiscard]] Extent take(std::size_t bytes) {
    bytes = to_pages(bytes);
    {
      const Lock lock(file_mutex_);
      open();
    }
    const Lock lock(mutex_);
    used_ += bytes;
    if (const auto offset = free_.take(bytes)) return {*offset, bytes};
    const Extent range{end_, bytes};
    end_ += bytes;
    return range;
  }
  // Takes a range back; the next punch_holes() gives it to the file system. Makes no system call.
  void give(const Extent& range) {
    if (range.bytes == 0) return;
    const Lock lock(mutex_);
    given_back_.push_back(range);
    used_ -= range.bytes;
  }
  // May wait for the file system: do not call it with a lock held.
  void punch_holes() {
    {
      const Lock lock(mutex_);
      if (given_back_.empty()) return;
    }
    const Lock file_lock(file_mutex_);
    std::vector<Extent> ranges;
    {
      const Lock lock(mutex_);
      ranges = std::exchange(given_back_, {});
    }
    for (const auto& range : ranges) {
      sys::punch_hole(file_, range.offset, range.bytes);
      const Lock lock(mutex_);
      free_.add(range.offset, range.bytes);
    }
  }

  // Transfer a range that is handed out, and wait for it. `memory` must be page-aligned and as large as the range.
  // Throw disk_full or backup (any other failure, a truncated file included): a part is transferred.
  void write(const Extent& range, const std::vector<HostRange>& memory) NO_THREAD_SAFETY_ANALYSIS {
    if (!transfer("pwrite", sys::pwrite, range, memory)) throw failure("pwrite", ENOSPC, range.bytes);
  }
  void read(const Extent& range, const std::vector<HostRange>& memory) NO_THREAD_SAFETY_ANALYSIS {
    if (transfer("pread", sys::pread, range, memory)) return;
    throw Error::from_driver(ErrorKind::backup, "pread", "end of file",
                             "the backup file in " + folder_ + " is shorter than what was written to it")
        .with_bytes(range.bytes);
  }

  // Returns the bytes that are handed out. Never waits for the file system.
  [[nodiscard]] std::size_t used_bytes() const noexcept { return used_; }

 private:
  static constexpr char kPrefix[] = "memsaver-backup-";

  // Deletes empty backup files that killed processes left. One that a living process is making loses only its name.
  void remove_left_behind() const REQUIRES(file_mutex_) {
    const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(folder_.c_str()), &closedir);
    if (entries == nullptr) return;
    while (const dirent* const entry = readdir(entries.get())) {
      struct stat about{};
      if (std::strncmp(entry->d_name, kPrefix, sizeof kPrefix - 1) == 0 &&
          fstatat(dirfd(entries.get()), entry->d_name, &about, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(about.st_mode) &&
          about.st_uid == getuid() && about.st_size == 0) {
        unlinkat(dirfd(entries.get()), entry->d_name, 0);
      }
    }
  }
  [[nodiscard]] Error failure(const char* call, int code, std::size_t bytes) const NO_THREAD_SAFETY_ANALYSIS {
    const bool full = code == ENOSPC || code == EDQUOT;
    const bool descriptors = code == EMFILE || code == ENFILE;
    return Error::from_errno(full ? ErrorKind::disk_full : ErrorKind::backup, call, code, ", backup file in " + folder_)
        .with_bytes(bytes)
        .with_advice(full          ? "free disk space or set MEMSAVER_FILE_DIR to a larger file system"
                     : descriptors ? "raise the limit of open files (ulimit -n) or close some, and repeat"
                                   : "");
  }
  void open() REQUIRES(file_mutex_) {
    if (file_ >= 0) return;
    for (const int flags : {O_DIRECT, 0}) {
      file_ = sys::open_unnamed(folder_.c_str(), flags);
      if (file_ >= 0) return;
    }
    // A file system without O_TMPFILE: create a file and delete it.
    remove_left_behind();
    std::string path = folder_ + "/" + kPrefix + "XXXXXX";
    file_ = sys::open_temporary(path.data());
    if (file_ < 0) {
      const int code = errno;
      if (code == EMFILE || code == ENFILE || code == ENOSPC || code == EDQUOT) {
        throw failure("open", code, 0);
      }
      throw Error(ErrorKind::configuration, "no backup file can be made in " + folder_ + ": " + std::strerror(code))
          .with_advice("set MEMSAVER_FILE_DIR to a folder that can be written");
    }
    unlink(path.c_str());
  }
  // Calls pread(2) or pwrite(2) until all is transferred. False if a call transfers nothing.
  // Not analysed: the file stays the same while a range of it is handed out.
  template <typename Call>
  [[nodiscard]] bool transfer(const char* name, const Call& call, const Extent& range,
                              const std::vector<HostRange>& memory) NO_THREAD_SAFETY_ANALYSIS {
    auto offset = static_cast<off_t>(range.offset);
    for (const auto& part : memory) {
      for (std::size_t done = 0; done < part.bytes;) {
        const ssize_t count = call(file_, reinterpret_cast<char*>(part.address) + done, part.bytes - done, offset);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) throw failure(name, errno, range.bytes);
        if (count == 0) return false;
        done += static_cast<std::size_t>(count);
        offset += count;
      }
    }
    return true;
  }

  Mutex file_mutex_ ACQUIRED_BEFORE(mutex_);  // held while a file is opened
  std::string folder_ GUARDED_BY(file_mutex_);
  int file_ GUARDED_BY(file_mutex_) = -1;

  Mutex mutex_;                                        // never held across a system call
  RangeSet free_ GUARDED_BY(mutex_);                   // holes below end_
  std::vector<Extent> given_back_ GUARDED_BY(mutex_);  // no hole punched yet
  std::size_t end_ GUARDED_BY(mutex_) = 0;
  std::atomic<std::size_t> used_{0};
};

}  // namespace memsaver
