#include "driver/host_ledger.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>

namespace memsaver {

namespace {

struct flock record_lock(off_t byte, short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

}  // namespace

std::string HostLedgerFile::path_of(const std::string& name) {
  constexpr char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
  if (name.find_first_not_of(plain) != std::string::npos) {
    throw Error(ErrorKind::configuration,
                "MEMSAVER_HOST_DEVICE: the name '" + name + "' may hold letters, digits, '-', '_' and '.' only");
  }
  return "/dev/shm/memsaver-" + std::to_string(getuid()) + "-" + name;
}

HostLedgerFile::~HostLedgerFile() {
  if (ledger_ != nullptr) munmap(ledger_, sizeof(HostLedger));
  close(file_);
}

Error HostLedgerFile::failure(const std::string& path, const char* what) {
  return {ErrorKind::configuration, "host device account " + path + ": " + what + " (" + std::strerror(errno) + ")"};
}

void HostLedgerFile::resize() {
  if (ftruncate(file_, sizeof(HostLedger)) != 0) throw failure(path_, "cannot be sized");
}

void HostLedgerFile::map() {
  void* const memory = mmap(nullptr, sizeof(HostLedger), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) throw failure(path_, "cannot be mapped");
  ledger_ = static_cast<HostLedger*>(memory);
}

bool HostLedgerFile::has_name() const {
  struct stat status{};
  return fstat(file_, &status) == 0 && status.st_nlink > 0;
}

void HostLedgerFile::remove() {
  unlink(path_.c_str());
  path_.clear();
}

void HostLedgerFile::lock() {
  auto lock = record_lock(0, F_WRLCK);
  while (fcntl(file_, F_SETLKW, &lock) != 0) {
    if (errno != EINTR) throw failure(path_, "cannot be locked");
  }
}

void HostLedgerFile::unlock() {
  auto lock = record_lock(0, F_UNLCK);
  fcntl(file_, F_SETLK, &lock);
}

bool HostLedgerFile::slot_is_taken(int slot) const {
  auto lock = record_lock(1 + slot, F_WRLCK);
  return fcntl(file_, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

void HostLedgerFile::take_slot(int slot) {
  auto lock = record_lock(1 + slot, F_WRLCK);
  if (fcntl(file_, F_SETLK, &lock) != 0) throw failure(path_, "cannot lock a slot");
}

// Without FUTEX_PRIVATE_FLAG: the word is shared between processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, value, nullptr, nullptr, 0);
}
void futex_wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace memsaver
