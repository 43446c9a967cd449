#include "driver/host_account.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>

#include "support/error.hpp"

namespace memsaver {

namespace {

constexpr int kSlots = 256;
constexpr off_t kLedgerLock = 0;  // the byte whose lock guards the ledger; slot i is guarded by byte 1 + i

Error failure(const std::string& what, const std::string& path) {
  return Error(ErrorKind::configuration,
               "host device account " + path + ": " + what + " (" + std::strerror(errno) + ")");
}

struct flock record(off_t byte, short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

std::string path_of(const std::string& name) {
  for (const char c : name) {
    const bool plain =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
    if (!plain) {
      throw Error(ErrorKind::configuration,
                  "MEMSAVER_HOST_DEVICE: the name '" + name + "' may hold letters, digits, '-', '_' and '.' only");
    }
  }
  return "/dev/shm/memsaver-" + std::to_string(getuid()) + "-" + name;
}

}  // namespace

struct HostAccount::Ledger {
  std::uint64_t capacity_bytes;
  struct Slot {
    std::uint64_t used_bytes;
  } slots[kSlots];
};

class HostAccount::Guard {
 public:
  explicit Guard(HostAccount& account) : threads_(account.mutex_), account_(account) {
    auto lock = record(kLedgerLock, F_WRLCK);
    while (fcntl(account_.file_, F_SETLKW, &lock) != 0) {
      if (errno != EINTR) throw failure("cannot be locked", account_.path_);
    }
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  ~Guard() {
    auto lock = record(kLedgerLock, F_UNLCK);
    fcntl(account_.file_, F_SETLK, &lock);
  }

 private:
  std::lock_guard<std::mutex> threads_;
  HostAccount& account_;
};

std::shared_ptr<HostAccount> HostAccount::open(const std::string& name, std::size_t capacity_bytes) {
  // One object for each name in a process: closing any descriptor of the file would drop all record locks on it.
  static std::mutex mutex;
  static auto* accounts = new std::map<std::string, std::weak_ptr<HostAccount>>;
  if (name.empty()) {
    const int file = memfd_create("memsaver-account", MFD_CLOEXEC);
    if (file < 0) throw failure("cannot be created", "(private)");
    std::shared_ptr<HostAccount> account(new HostAccount("", file, capacity_bytes));
    return account;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  // A forked child has locks of its own, and so it has accounts of its own.
  const std::string key = name + "/" + std::to_string(getpid());
  if (auto account = (*accounts)[key].lock()) return account;
  const std::string path = path_of(name);
  for (;;) {
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) throw failure("cannot be opened", path);
    std::shared_ptr<HostAccount> account(new HostAccount(path, file, capacity_bytes));
    struct stat status{};
    if (fstat(file, &status) == 0 && status.st_nlink > 0) {
      (*accounts)[key] = account;
      return account;
    }
    // The last process left between our open and our lock and took the file's name with it: open the next one.
    account->path_.clear();
  }
}

HostAccount::HostAccount(std::string path, int file, std::size_t capacity_bytes) : path_(std::move(path)), file_(file) {
  try {
    join(capacity_bytes);
  } catch (...) {
    if (ledger_ != nullptr) munmap(ledger_, sizeof(Ledger));
    close(file_);
    throw;
  }
}

void HostAccount::join(std::size_t capacity_bytes) {
  const Guard guard(*this);
  if (ftruncate(file_, sizeof(Ledger)) != 0) throw failure("cannot be sized", path_);
  void* memory = mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) throw failure("cannot be mapped", path_);
  ledger_ = static_cast<Ledger*>(memory);
  int free_slot = -1;
  bool alone = true;
  for (int slot = 0; slot < kSlots; ++slot) {
    if (slot_lives(slot)) {
      alone = false;
    } else if (free_slot < 0) {
      free_slot = slot;
    }
  }
  if (free_slot < 0) throw Error(ErrorKind::configuration, "host device account " + path_ + ": all slots are taken");
  if (!alone && ledger_->capacity_bytes != capacity_bytes) {
    throw Error(ErrorKind::configuration,
                "MEMSAVER_HOST_CAPACITY is " + std::to_string(capacity_bytes) + " bytes, but a process that shares " +
                    path_ + " uses " + std::to_string(ledger_->capacity_bytes) + ": give all of them the same value");
  }
  ledger_->capacity_bytes = capacity_bytes;
  ledger_->slots[free_slot].used_bytes = 0;
  auto lock = record(1 + free_slot, F_WRLCK);
  if (fcntl(file_, F_SETLK, &lock) != 0) throw failure("cannot lock a slot", path_);
  slot_ = free_slot;
}

HostAccount::~HostAccount() {
  if (!path_.empty()) {
    try {
      const Guard guard(*this);
      ledger_->slots[slot_].used_bytes = 0;
      bool alone = true;
      for (int slot = 0; slot < kSlots; ++slot) alone = alone && (slot == slot_ || !slot_lives(slot));
      if (alone) unlink(path_.c_str());
    } catch (const Error&) {
      // The kernel drops our slot with the descriptor; the file stays and is taken over.
    }
  }
  munmap(ledger_, sizeof(Ledger));
  close(file_);
}

bool HostAccount::slot_lives(int slot) const {
  if (slot == slot_) return true;
  auto lock = record(1 + slot, F_WRLCK);
  return fcntl(file_, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

std::size_t HostAccount::sum_of_the_living() {
  std::size_t sum = 0;
  for (int slot = 0; slot < kSlots; ++slot) {
    auto& used = ledger_->slots[slot].used_bytes;
    if (used != 0 && !slot_lives(slot)) used = 0;
    sum += used;
  }
  return sum;
}

void HostAccount::take(std::size_t bytes) {
  const Guard guard(*this);
  const std::size_t used = sum_of_the_living();
  const std::size_t free = ledger_->capacity_bytes > used ? ledger_->capacity_bytes - used : 0;
  if (bytes > free) {
    throw Error::from_driver(ErrorKind::out_of_device_memory, "create", "OUT_OF_MEMORY", "the host device is full")
        .with_memory(bytes, free);
  }
  ledger_->slots[slot_].used_bytes += bytes;
}

void HostAccount::give(std::size_t bytes) {
  const Guard guard(*this);
  ledger_->slots[slot_].used_bytes -= bytes;
}

std::size_t HostAccount::used_bytes() {
  const Guard guard(*this);
  return sum_of_the_living();
}

std::size_t HostAccount::capacity_bytes() const noexcept { return ledger_->capacity_bytes; }

}  // namespace memsaver
