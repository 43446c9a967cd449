#include "support/system.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <utility>

namespace memsaver::sys {

std::atomic<Hook> hook{nullptr};

namespace {

int ask_hook(const char* call, std::size_t bytes = 0) {
  const Hook ask = hook.load(std::memory_order_relaxed);
  return ask == nullptr ? 0 : ask(call, bytes);
}

// Whether the hook lets the call fail; then sets errno.
bool refused(const char* call, std::size_t bytes = 0) {
  const int code = ask_hook(call, bytes);
  if (code > 0) errno = code;
  return code > 0;
}

std::size_t part_of(std::size_t bytes) {
  constexpr std::size_t page = 4096;
  return bytes / 2 / page * page;
}

}  // namespace

void* map_memory(std::size_t bytes, int flags) {
  if (refused("mmap", bytes)) return MAP_FAILED;
  return ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

int open_unnamed(const char* folder, int flags) {
  return refused("open") ? -1 : ::open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
}

int open_temporary(char* path_template, int flags) {
  return refused("mkostemp") ? -1 : ::mkostemp(path_template, flags);
}

std::FILE* open_text(const char* path) { return refused("fopen") ? nullptr : std::fopen(path, "re"); }

int fstatvfs(int file, struct statvfs* status) { return refused("fstatvfs") ? -1 : ::fstatvfs(file, status); }

int fallocate(int file, int mode, off_t offset, off_t bytes) {
  return refused("fallocate", static_cast<std::size_t>(bytes)) ? -1 : ::fallocate(file, mode, offset, bytes);
}

ssize_t pwrite(int file, const void* data, std::size_t bytes, off_t offset) {
  const int code = ask_hook("pwrite", bytes);
  if (code > 0) errno = code;
  if (code > 0) return -1;
  return ::pwrite(file, data, code == kShort ? part_of(bytes) : bytes, offset);
}

ssize_t pread(int file, void* data, std::size_t bytes, off_t offset) {
  const int code = ask_hook("pread", bytes);
  if (code > 0) errno = code;
  if (code > 0) return -1;
  return ::pread(file, data, code == kShort ? part_of(bytes) : bytes, offset);
}

std::optional<std::thread> start_thread(std::function<void()> task) {
  if (refused("thread")) return std::nullopt;
  try {
    return std::thread(std::move(task));
  } catch (const std::system_error&) {
    return std::nullopt;
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
