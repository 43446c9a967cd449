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

// The calls to the operating system on which backups depend: host memory, files and threads. Each is the call of the
// same name behind a hook for tests, which costs a load of a null pointer if there is none. Any thread may call them.
//
// The hook gets the call's name and bytes. It returns 0 to let the call run, an errno to let it fail, or kShort to let
// a transfer end early (after about half, or with nothing if that is less than a page).
inline constexpr int kShort = -1;
using Hook = int (*)(const char* call, std::size_t bytes);
extern std::atomic<Hook> hook;

// mmap(2) of readable and writable private memory; `flags` are added to MAP_PRIVATE | MAP_ANONYMOUS. Throws
// out_of_host_memory.
[[nodiscard]] void* map_memory(std::size_t bytes, int flags);
// mmap(2) of a part of a file, readable, writable and shared. Throws out_of_host_memory.
[[nodiscard]] void* map_file(int file, std::size_t offset, std::size_t bytes);
// Allocates the pages of mapped memory. Returns 0 or the errno: ENOMEM or EFAULT if there is no memory for them. (A
// kernel before 5.14 ends the process then, with SIGBUS.)
[[nodiscard]] int make_pages(void* memory, std::size_t bytes);
// open(2) of a file without a name and mkostemp(3), for the owner only. Return -1 with errno set on failure, as do all
// that follow but open_text(), which returns null.
[[nodiscard]] int open_unnamed(const char* folder, int flags);
[[nodiscard]] int open_temporary(char* path_template, int flags);
// fopen(3), to read.
[[nodiscard]] std::FILE* open_text(const char* path);
[[nodiscard]] int fstatvfs(int file, struct statvfs* status);
[[nodiscard]] ssize_t pwrite(int file, const void* data, std::size_t bytes, off_t offset);
[[nodiscard]] ssize_t pread(int file, void* data, std::size_t bytes, off_t offset);

// fallocate(2) that returns the pages of a part of a file to the system. What fails keeps its pages.
void punch_hole(int file, std::size_t offset, std::size_t bytes);

// Returns a thread that runs `task`; nothing if the system refuses one.
[[nodiscard]] std::optional<std::thread> start_thread(std::function<void()> task);
// Runs `work(part)` for each part below `parts`, and waits for all: each in a thread, except the first, and those for
// which the system refuses one, which the calling thread runs. Throws what the first part that failed threw.
void run_in_threads(std::size_t parts, const std::function<void(std::size_t)>& work);
// Runs `task` in another thread, or, if the system refuses one, in the first thread that waits for the result.
[[nodiscard]] std::shared_future<void> run_beside(std::function<void()> task);

}  // namespace memsaver::sys
