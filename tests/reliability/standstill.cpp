// Preloaded into processes that a test kills: holds one system call before or after it runs, so that the process is
// killed exactly there.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstring>

namespace {

std::atomic<bool> armed{false};
std::atomic<long> left{0};
bool after = false;
int report = -1;

[[noreturn]] void stand_still(const char* call) {
  (void)!write(report, call, std::strlen(call));
  for (;;) pause();
}

template <typename... Arguments>
long through(const char* call, long number, Arguments... arguments) {
  const bool here = armed && --left == 0;
  if (here && !after) stand_still(call);
  const long result = syscall(number, arguments...);
  if (here) stand_still(call);
  return result;
}

}  // namespace

extern "C" {

// Holds the `nth` of the calls below from now on (1: the next), in any thread, and writes its name to `report_to`.
// 0: none.
void stand_still_at(long nth, int after_it, int report_to) {
  armed = false;
  left = nth;
  after = after_it != 0;
  report = report_to;
  armed = nth > 0;
}

void* mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
  return reinterpret_cast<void*>(through("mmap", SYS_mmap, address, bytes, protection, flags, file, offset));
}
int munmap(void* address, size_t bytes) noexcept {
  return static_cast<int>(through("munmap", SYS_munmap, address, bytes));
}
int mprotect(void* address, size_t bytes, int protection) noexcept {
  return static_cast<int>(through("mprotect", SYS_mprotect, address, bytes, protection));
}
int fallocate(int file, int mode, off_t offset, off_t bytes) {
  return static_cast<int>(through("fallocate", SYS_fallocate, file, mode, offset, bytes));
}
int ftruncate(int file, off_t bytes) noexcept {
  return static_cast<int>(through("ftruncate", SYS_ftruncate, file, bytes));
}
int memfd_create(const char* name, unsigned flags) noexcept {
  return static_cast<int>(through("memfd_create", SYS_memfd_create, name, flags));
}
int unlink(const char* path) noexcept { return static_cast<int>(through("unlink", SYS_unlink, path)); }
int close(int file) { return static_cast<int>(through("close", SYS_close, file)); }
ssize_t pwrite(int file, const void* data, size_t bytes, off_t offset) {
  return through("pwrite", SYS_pwrite64, file, data, bytes, offset);
}
ssize_t pread(int file, void* data, size_t bytes, off_t offset) {
  return through("pread", SYS_pread64, file, data, bytes, offset);
}
int open(const char* path, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  const int mode = va_arg(rest, int);  // garbage if it was not passed; the system then ignores it
  va_end(rest);
  return static_cast<int>(through("open", SYS_openat, AT_FDCWD, path, flags, mode));
}
int fcntl(int file, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void* const argument = va_arg(rest, void*);
  va_end(rest);
  const bool locks = command == F_SETLK || command == F_SETLKW;
  if (!locks) return static_cast<int>(syscall(SYS_fcntl, file, command, argument));
  const bool gives = static_cast<struct flock*>(argument)->l_type == F_UNLCK;
  return static_cast<int>(through(gives ? "unlock" : "lock", SYS_fcntl, file, command, argument));
}

}  // extern "C"
