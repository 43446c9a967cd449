// Preloaded into processes that a test kills: holds one system call before or after it runs, so that the process is
// killed exactly there.

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
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

// The system's syscall(2), which is replaced below. It is no static of a function: threads would wait for that one by
// the very call.
std::atomic<long (*)(long, ...)> real_syscall{nullptr};

template <typename... Arguments>
long system_call(long number, Arguments... arguments) {
  if (real_syscall == nullptr) real_syscall = reinterpret_cast<long (*)(long, ...)>(dlsym(RTLD_NEXT, "syscall"));
  return real_syscall.load()(number, arguments...);
}

template <typename... Arguments>
long through(const char* call, long number, Arguments... arguments) {
  const bool here = armed && --left == 0;
  if (here && !after) stand_still(call);
  const long result = system_call(number, arguments...);
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

// The same from the start of a program that does not call it, by STAND_STILL_AT="NTH AFTER_IT REPORT_TO".
__attribute__((constructor)) void stand_still_from_start() {
  const char* const place = std::getenv("STAND_STILL_AT");
  long nth = 0;
  int after_it = 0;
  int report_to = -1;
  if (place != nullptr && std::sscanf(place, "%ld %d %d", &nth, &after_it, &report_to) == 3) {
    stand_still_at(nth, after_it, report_to);
  }
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
  if (!locks) return static_cast<int>(system_call(SYS_fcntl, file, command, argument));
  const bool gives = static_cast<struct flock*>(argument)->l_type == F_UNLCK;
  return static_cast<int>(through(gives ? "unlock" : "lock", SYS_fcntl, file, command, argument));
}
int fchmod(int file, mode_t mode) noexcept { return static_cast<int>(through("fchmod", SYS_fchmod, file, mode)); }
int madvise(void* address, size_t bytes, int advice) noexcept {
  return static_cast<int>(through("madvise", SYS_madvise, address, bytes, advice));
}
int socket(int domain, int type, int protocol) noexcept {
  return static_cast<int>(through("socket", SYS_socket, domain, type, protocol));
}
int bind(int file, const sockaddr* address, socklen_t bytes) noexcept {
  return static_cast<int>(through("bind", SYS_bind, file, address, bytes));
}
int listen(int file, int most) noexcept { return static_cast<int>(through("listen", SYS_listen, file, most)); }
int connect(int file, const sockaddr* address, socklen_t bytes) {
  return static_cast<int>(through("connect", SYS_connect, file, address, bytes));
}
int accept4(int file, sockaddr* address, socklen_t* bytes, int flags) {
  return static_cast<int>(through("accept4", SYS_accept4, file, address, bytes, flags));
}
int shutdown(int file, int how) noexcept { return static_cast<int>(through("shutdown", SYS_shutdown, file, how)); }
ssize_t sendmsg(int file, const msghdr* message, int flags) {
  return through("sendmsg", SYS_sendmsg, file, message, flags);
}
ssize_t recvmsg(int file, msghdr* message, int flags) { return through("recvmsg", SYS_recvmsg, file, message, flags); }
int poll(pollfd* files, nfds_t count, int timeout_ms) {
  timespec time{timeout_ms / 1000, timeout_ms % 1000 * 1'000'000L};
  const timespec* const limit = timeout_ms < 0 ? nullptr : &time;
  return static_cast<int>(through("poll", SYS_ppoll, files, count, limit, nullptr, 0));
}
long syscall(long number, ...) noexcept {
  va_list rest;
  va_start(rest, number);
  long each[6];  // garbage from the first on that was not passed; the system then ignores it
  for (long& argument : each) argument = va_arg(rest, long);
  va_end(rest);
  if (number != SYS_futex) return system_call(number, each[0], each[1], each[2], each[3], each[4], each[5]);
  const bool wakes = (each[1] & FUTEX_CMD_MASK) == FUTEX_WAKE;
  return through(wakes ? "wake" : "wait", number, each[0], each[1], each[2], each[3], each[4], each[5]);
}

}  // extern "C"
