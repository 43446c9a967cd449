#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <functional>
#include <future>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "support/error.hpp"

namespace memsaver::sys {

// The calls to the operating system on which backups depend: host memory, files and threads. Each is the call of the
// same name behind a hook for tests. Any thread may call them.
//
// The hook gets the call's name and bytes. It returns 0 to let the call run, an errno to let it fail, or kShort to let
// a transfer end early: after about half, or with nothing if that is less than a page.
inline constexpr int kShort = -1;
using Hook = int (*)(const char* call, std::size_t bytes);
inline std::atomic<Hook> hook{nullptr};

// Asks the hook whether a call may run on `bytes`. Returns false, with errno set, if not; a transfer that is to end
// early gets fewer bytes.
inline bool allowed(const char* call, std::size_t& bytes) {
  constexpr std::size_t page = 4096;
  const Hook ask = hook.load(std::memory_order_relaxed);
  const int code = ask == nullptr ? 0 : ask(call, bytes);
  if (code == kShort) bytes = bytes / 2 / page * page;
  if (code > 0) errno = code;
  return code <= 0;
}

inline bool refused(const char* call, std::size_t bytes = 0) { return !allowed(call, bytes); }

// mmap(2) of readable and writable memory, with `flags` added: private and without a file, or, if `file` is given, a
// shared part of it. Throws out_of_host_memory.
[[nodiscard]] inline void* map(std::size_t bytes, int flags = 0, int file = -1, std::size_t offset = 0) {
  flags |= file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  if (!refused("mmap", bytes)) {
    void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, static_cast<off_t>(offset));
    if (memory != MAP_FAILED) return memory;
  }
  throw Error::from_errno(ErrorKind::out_of_host_memory, "mmap", errno).with_bytes(bytes);
}

// Allocates the pages of mapped memory. Returns 0, or ENOMEM or EFAULT if memory is short (before Linux 5.14: SIGBUS).
[[nodiscard]] inline int make_pages(void* memory, std::size_t bytes) {
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
// open(2) of a file without a name and mkostemp(3), for the owner only. Return -1 with errno set on failure, as do the
// functions up to pread(); open_text() returns null.
[[nodiscard]] inline int open_unnamed(const char* folder, int flags) {
  return refused("open") ? -1 : ::open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
}
[[nodiscard]] inline int open_temporary(char* path_template) {
  return refused("mkostemp") ? -1 : ::mkostemp(path_template, O_CLOEXEC);
}
// fopen(3), to read.
[[nodiscard]] inline std::FILE* open_text(const char* path) {
  return refused("fopen") ? nullptr : std::fopen(path, "re");
}
[[nodiscard]] inline int fstatvfs(int file, struct statvfs* status) {
  return refused("fstatvfs") ? -1 : ::fstatvfs(file, status);
}
[[nodiscard]] inline ssize_t pwrite(int file, const void* data, std::size_t bytes, off_t offset) {
  return allowed("pwrite", bytes) ? ::pwrite(file, data, bytes, offset) : -1;
}
[[nodiscard]] inline ssize_t pread(int file, void* data, std::size_t bytes, off_t offset) {
  return allowed("pread", bytes) ? ::pread(file, data, bytes, offset) : -1;
}

// fallocate(2) that returns the pages of a part of a file to the system. If it fails, the part keeps its pages.
inline void punch_hole(int file, std::size_t offset, std::size_t bytes) {
  if (refused("fallocate", bytes)) return;
  (void)!::fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                     static_cast<off_t>(bytes));
}

// Returns what `call` throws; null if nothing.
template <typename Call>
[[nodiscard]] std::exception_ptr failure_of(const Call& call) {
  try {
    call();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}
// Returns a thread that runs `task`; nothing if the system refuses one.
[[nodiscard]] inline std::optional<std::thread> start_thread(std::function<void()> task) {
  if (refused("thread")) return std::nullopt;
  try {
    return std::thread(std::move(task));
  } catch (const std::system_error&) {
    return std::nullopt;
  }
}
// Returns `most`, or the number of processors if that is smaller.
[[nodiscard]] inline std::size_t up_to_cores(std::size_t most) {
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, most);
}
// Returns how many threads should copy, pack or unpack `bytes`, at most `most`: for less than 1 MiB each, a thread is
// not worth its start.
[[nodiscard]] inline std::size_t threads_for(std::size_t bytes, std::size_t most) {
  return std::min(up_to_cores(most), (bytes >> 20) + 1);
}
// Runs `work(part)` for each part below `parts`, and waits for all: the first in the calling thread, each other one in
// a new one if the system starts it. Throws what the first part that failed threw.
inline void run_in_threads(std::size_t parts, const std::function<void(std::size_t)>& work) {
  std::vector<std::exception_ptr> failures(parts);
  const auto run = [&](std::size_t part) { failures[part] = failure_of([&] { work(part); }); };
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
// Runs `work(i)` for each i below `count`, in up to `most` threads. Throws as run_in_threads(): some may not have run.
inline void for_each_in_threads(std::size_t count, std::size_t most, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  run_in_threads(std::min(up_to_cores(most), count), [&](std::size_t) {
    for (std::size_t i = next++; i < count; i = next++) work(i);
  });
}

}  // namespace memsaver::sys
