#pragma once

#include <sys/statvfs.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <future>
#include <optional>
#include <thread>

namespace memsaver::sys {

// The calls to the operating system that may fail where backups are made: host memory, files and threads. Each is the
// call of the same name; tests put a hook in front, and without one it costs a load of a null pointer.
//
// The hook is told the call and its bytes, in any thread. It returns 0 for the call to run, an errno for it to fail
// with, or kShort for a transfer to end early (after about half, or with nothing where that is less than a page).
inline constexpr int kShort = -1;
using Hook = int (*)(const char* call, std::size_t bytes);
extern std::atomic<Hook> hook;

// Readable and writable private memory; MAP_FAILED and errno otherwise. `flags` go beside MAP_PRIVATE | MAP_ANONYMOUS.
[[nodiscard]] void* map_memory(std::size_t bytes, int flags);
// open(2) and mkostemp(3), for the owner only.
[[nodiscard]] int open_unnamed(const char* folder, int flags);
[[nodiscard]] int open_temporary(char* path_template, int flags);
// fopen(3), to read.
[[nodiscard]] std::FILE* open_text(const char* path);
[[nodiscard]] int fstatvfs(int file, struct statvfs* status);
[[nodiscard]] int fallocate(int file, int mode, off_t offset, off_t bytes);
[[nodiscard]] ssize_t pwrite(int file, const void* data, std::size_t bytes, off_t offset);
[[nodiscard]] ssize_t pread(int file, void* data, std::size_t bytes, off_t offset);

// A thread that runs `task`; nothing where the system has no more threads for us.
[[nodiscard]] std::optional<std::thread> start_thread(std::function<void()> task);
// Runs `task` in another thread; where there is none, in the one that first waits for it.
[[nodiscard]] std::shared_future<void> run_beside(std::function<void()> task);

}  // namespace memsaver::sys
