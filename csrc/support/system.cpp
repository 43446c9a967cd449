#include "support/system.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <exception>
#include <system_error>
#include <utility>
#include <vector>

#include "support/error.hpp"

namespace memsaver::sys {

std::atomic<Hook> hook{nullptr};

namespace {

// Asks the hook whether a call may run on `bytes`. Returns false, with errno set, if not; a transfer that is to end
// early gets fewer bytes.
bool allowed(const char* call, std::size_t& bytes) {
  constexpr std::size_t page = 4096;
  const Hook ask = hook.load(std::memory_order_relaxed);
  const int code = ask == nullptr ? 0 : ask(call, bytes);
  if (code == kShort) bytes = bytes / 2 / page * page;
  if (code > 0) errno = code;
  return code <= 0;
}

bool refused(const char* call, std::size_t bytes = 0) { return !allowed(call, bytes); }

void* map(std::size_t bytes, int flags, int file, off_t offset) {
  if (!refused("mmap", bytes)) {
    void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, offset);
    if (memory != MAP_FAILED) return memory;
  }
  throw Error::from_errno(ErrorKind::out_of_host_memory, "mmap", errno).with_bytes(bytes);
}

}  // namespace

void* map_memory(std::size_t bytes, int flags) { return map(bytes, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0); }

void* map_file(int file, std::size_t offset, std::size_t bytes) {
  return map(bytes, MAP_SHARED, file, static_cast<off_t>(offset));
}

int make_pages(void* memory, std::size_t bytes) {
  constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, which older headers lack
  if (refused("madvise", bytes)) return errno;
  while (::madvise(memory, bytes, populate_write) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    for (std::size_t at = 0; at < bytes; at += page) static_cast<volatile char*>(memory)[at] = 0;
    break;
  }
  return 0;
}

int open_unnamed(const char* folder, int flags) {
  return refused("open") ? -1 : ::open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
}

int open_temporary(char* path_template, int flags) {
  return refused("mkostemp") ? -1 : ::mkostemp(path_template, flags);
}

std::FILE* open_text(const char* path) { return refused("fopen") ? nullptr : std::fopen(path, "re"); }

int fstatvfs(int file, struct statvfs* status) { return refused("fstatvfs") ? -1 : ::fstatvfs(file, status); }

void punch_hole(int file, std::size_t offset, std::size_t bytes) {
  if (refused("fallocate", bytes)) return;
  (void)!::fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                     static_cast<off_t>(bytes));
}

ssize_t pwrite(int file, const void* data, std::size_t bytes, off_t offset) {
  return allowed("pwrite", bytes) ? ::pwrite(file, data, bytes, offset) : -1;
}

ssize_t pread(int file, void* data, std::size_t bytes, off_t offset) {
  return allowed("pread", bytes) ? ::pread(file, data, bytes, offset) : -1;
}

std::optional<std::thread> start_thread(std::function<void()> task) {
  if (refused("thread")) return std::nullopt;
  try {
    return std::thread(std::move(task));
  } catch (const std::system_error&) {
    return std::nullopt;
  }
}

void run_in_threads(std::size_t parts, const std::function<void(std::size_t)>& work) {
  std::vector<std::exception_ptr> failures(parts);
  const auto run = [&](std::size_t part) {
    try {
      work(part);
    } catch (...) {
      failures[part] = std::current_exception();
    }
  };
  std::vector<std::thread> started;
  for (std::size_t part = 1; part < parts; ++part) {
    if (auto thread = start_thread([&run, part] { run(part); })) {
      started.push_back(std::move(*thread));
    } else {
      run(part);
    }
  }
  if (parts > 0) run(0);
  for (auto& thread : started) thread.join();
  for (const auto& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

std::shared_future<void> run_beside(std::function<void()> task) {
  if (!refused("thread")) {
    try {
      return std::async(std::launch::async, task).share();
    } catch (const std::system_error&) {
      // The caller of wait() or get() runs it.
    }
  }
  return std::async(std::launch::deferred, std::move(task)).share();
}

}  // namespace memsaver::sys
