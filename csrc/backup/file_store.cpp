#include "backup/file_store.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "support/error.hpp"
#include "support/host_memory.hpp"
#include "support/system.hpp"

namespace memsaver {

namespace {

constexpr char kPrefix[] = "memsaver-backup-";

// Deletes empty backup files of processes that were killed between the creation of a file and its deletion. A process
// that is between the two at this moment loses only the name.
void remove_left_behind(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(opendir(folder.c_str()), &closedir);
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

Error file_failure(const char* call, int code, const std::string& folder, std::size_t bytes) {
  const bool full = code == ENOSPC || code == EDQUOT;
  const bool descriptors = code == EMFILE || code == ENFILE;
  return Error::from_errno(full ? ErrorKind::disk_full : ErrorKind::backup, call, code, ", backup file in " + folder)
      .with_bytes(bytes)
      .with_advice(full          ? "free disk space or set MEMSAVER_FILE_DIR to a larger file system"
                   : descriptors ? "raise the limit of open files (ulimit -n) or close some, and repeat"
                                 : "");
}

}  // namespace

bool is_in_memory(const std::string& folder) {
  struct statfs about{};
  return statfs(folder.c_str(), &about) == 0 && (about.f_type == TMPFS_MAGIC || about.f_type == RAMFS_MAGIC);
}

FileStore::FileStore(std::string folder) : folder_(std::move(folder)) {}

FileStore::~FileStore() {
  if (file_ >= 0) close(file_);
}

void FileStore::open() {
  if (file_ >= 0) return;
  for (const int flags : {O_DIRECT, 0}) {
    file_ = sys::open_unnamed(folder_.c_str(), flags);
    if (file_ >= 0) return;
  }
  // A file system without O_TMPFILE: create a file and delete it.
  remove_left_behind(folder_);
  std::string path = folder_ + "/" + kPrefix + "XXXXXX";
  file_ = sys::open_temporary(path.data(), O_CLOEXEC);
  if (file_ < 0) {
    const int code = errno;
    if (code == EMFILE || code == ENFILE || code == ENOSPC || code == EDQUOT) {
      throw file_failure("open", code, folder_, 0);
    }
    throw Error(ErrorKind::configuration, "no backup file can be made in " + folder_ + ": " + std::strerror(code))
        .with_advice("set MEMSAVER_FILE_DIR to a folder that can be written");
  }
  unlink(path.c_str());
}

bool FileStore::move_to(const std::string& folder) {
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

void FileStore::check(std::size_t bytes) {
  punch_holes();
  const Lock lock(file_mutex_);
  open();
  struct statvfs status{};
  if (sys::fstatvfs(file_, &status) != 0) throw file_failure("fstatvfs", errno, folder_, bytes);
  std::size_t free = static_cast<std::size_t>(status.f_bavail) * status.f_frsize;
  if (is_in_memory(folder_)) free = std::min(free, available_memory_bytes(bytes));
  if (bytes > free) {
    throw Error(ErrorKind::disk_full, "the file system of " + folder_ + " has too little space for the backup")
        .with_memory(bytes, free)
        .with_advice("free disk space or set MEMSAVER_FILE_DIR to a larger file system");
  }
}

FileRange FileStore::take(std::size_t bytes) {
  bytes = to_pages(bytes);
  {
    const Lock lock(file_mutex_);
    open();
  }
  const Lock lock(mutex_);
  used_ += bytes;
  if (const auto offset = free_.take(bytes)) return {*offset, bytes};
  const FileRange range{end_, bytes};
  end_ += bytes;
  return range;
}

void FileStore::give(const FileRange& range) {
  if (range.bytes == 0) return;
  const Lock lock(mutex_);
  given_back_.push_back(range);
  used_ -= range.bytes;
}

void FileStore::punch_holes() {
  {
    const Lock lock(mutex_);
    if (given_back_.empty()) return;
  }
  const Lock file_lock(file_mutex_);
  std::vector<FileRange> ranges;
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

// Not analysed: the file stays the same while a range of it is handed out.
template <typename Call>
bool FileStore::transfer(const char* name, const Call& call, const FileRange& range,
                         const std::vector<HostRange>& memory) NO_THREAD_SAFETY_ANALYSIS {
  auto offset = static_cast<off_t>(range.offset);
  for (const auto& part : memory) {
    for (std::size_t done = 0; done < part.bytes;) {
      const ssize_t count = call(file_, reinterpret_cast<char*>(part.address) + done, part.bytes - done, offset);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) throw file_failure(name, errno, folder_, range.bytes);
      if (count == 0) return false;
      done += static_cast<std::size_t>(count);
      offset += count;
    }
  }
  return true;
}

void FileStore::write(const FileRange& range, const std::vector<HostRange>& memory) NO_THREAD_SAFETY_ANALYSIS {
  if (!transfer("pwrite", sys::pwrite, range, memory)) throw file_failure("pwrite", ENOSPC, folder_, range.bytes);
}

void FileStore::read(const FileRange& range, const std::vector<HostRange>& memory) NO_THREAD_SAFETY_ANALYSIS {
  if (transfer("pread", sys::pread, range, memory)) return;
  throw Error::from_driver(ErrorKind::backup, "pread", "end of file",
                           "the backup file in " + folder_ + " is shorter than what was written to it")
      .with_bytes(range.bytes);
}

}  // namespace memsaver
