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

// The calls to the operating system that making backups depends on: host memory, files and threads. Each is the call of
// the same name behind a hook for tests, which costs a load of a null pointer if there is none.
//
// The hook gets the call's name and bytes, in any thread. It returns 0 to let the call run, an errno to let it fail, or
// kShort to let a transfer end early (after about half, or with nothing if that is less than a page).
inline constexpr int kShort = -1;
using Hook = int (*)(const char* call, std::size_t bytes);
extern std::atomic<Hook> hook;

// mmap(2) of readable and writable private memory; `flags` are added to MAP_PRIVATE | MAP_ANONYMOUS.
// Throws ErrorKind::out_of_host_memory.
[[nodiscard]] void* map_memory(std::size_t bytes, int flags);
// mmap(2) of a part of a file, readable, writable and shared. Throws ErrorKind::out_of_host_memory.
[[nodiscard]] void* map_file(int file, std::size_t offset, std::size_t bytes);
// Makes the pages of mapped memory. Returns 0, or the errno: ENOMEM or EFAULT if there is no memory for them. (A kernel
// before 5.14 ends the process then, with SIGBUS.)
[[nodiscard]] int make_pages(void* memory, std::size_t bytes);
// open(2) and mkostemp(3), for the owner only.
[[nodiscard]] int open_unnamed(const char* folder, int flags);
[[nodiscard]] int open_temporary(char* path_template, int flags);
// fopen(3), to read.
[[nodiscard]] std::FILE* open_text(const char* path);
[[nodiscard]] int fstatvfs(int file, struct statvfs* status);
[[nodiscard]] int fallocate(int file, int mode, off_t offset, off_t bytes);
[[nodiscard]] ssize_t pwrite(int file, const void* data, std::size_t bytes, off_t offset);
[[nodiscard]] ssize_t pread(int file, void* data, std::size_t bytes, off_t offset);

// A thread that runs `task`; nothing if the system refuses one.
[[nodiscard]] std::optional<std::thread> start_thread(std::function<void()> task);
// Returns once `work(part)`, which must not throw, has run for each part below `parts`: a thread for each, this one for
// the first and for those that the system refuses a thread.
void run_in_threads(std::size_t parts, const std::function<void(std::size_t)>& work);
// Runs `task` in another thread, or, if the system refuses one, in the first thread that waits for it.
[[nodiscard]] std::shared_future<void> run_beside(std::function<void()> task);

}  // namespace memsaver::sys
