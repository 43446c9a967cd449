#include "driver/host_account.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
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
  struct Hibernation {
    std::atomic<std::uint32_t> state;  // a State; also what those who wait for it wait on
    std::uint32_t reserved;
    std::uint64_t kept_bytes;  // what the process holds while it is checkpointed, and used_bytes does not count
  } hibernations[kSlots];

  // What a process that takes the slot, or leaves it, starts from.
  void clear(int slot) {
    slots[slot].used_bytes = 0;
    hibernations[slot].kept_bytes = 0;
    hibernations[slot].state = 0;
  }
};

namespace {

const char* name_of(HostAccount::State state) {
  constexpr const char* names[] = {"running", "locked", "checkpointed", "failed"};
  return names[static_cast<std::uint32_t>(state)];
}

// Between processes, hence not FUTEX_PRIVATE_FLAG.
void wait_while(std::atomic<std::uint32_t>& word, std::uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<std::uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

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

struct HostAccount::Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<HostAccount>> accounts;

  static Registry& instance() {
    static auto* registry = new Registry;
    return *registry;
  }

  // A forked child has locks of its own, and so it has accounts of its own.
  static std::string key_of(const std::string& name) { return std::to_string(getpid()) + "/" + name; }

  // At the process's end, which comes without the destructor of what the interpreter still holds.
  static void leave_all() {
    Registry& registry = instance();
    const std::unique_lock<std::mutex> lock(registry.mutex, std::try_to_lock);
    if (!lock) return;  // forked while another thread held it, or that thread is at it still
    const std::string own = key_of("");
    for (const auto& [key, held] : registry.accounts) {
      if (key.compare(0, own.size(), own) != 0) continue;
      if (const auto account = held.lock()) account->leave();
    }
  }
};

std::shared_ptr<HostAccount> HostAccount::open(const std::string& name, std::size_t capacity_bytes) {
  if (name.empty()) {
    const int file = memfd_create("memsaver-account", MFD_CLOEXEC);
    if (file < 0) throw failure("cannot be created", "(private)");
    std::shared_ptr<HostAccount> account(new HostAccount("", file, capacity_bytes));
    return account;
  }
  // One object for each name in a process: closing any descriptor of the file would drop all record locks on it.
  Registry& registry = Registry::instance();
  static const int at_exit = std::atexit(Registry::leave_all);
  static_cast<void>(at_exit);  // without it the file stays behind, which holds nothing
  const std::lock_guard<std::mutex> lock(registry.mutex);
  auto& known = registry.accounts[Registry::key_of(name)];
  if (auto account = known.lock()) return account;
  const std::string path = path_of(name);
  for (;;) {
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) throw failure("cannot be opened", path);
    std::shared_ptr<HostAccount> account(new HostAccount(path, file, capacity_bytes));
    struct stat status{};
    if (fstat(file, &status) == 0 && status.st_nlink > 0) {
      known = account;
      return account;
    }
    // The last process left between our open and our lock and took the file's name with it: open the next one.
    account->path_.clear();
  }
}

std::shared_ptr<HostAccount> HostAccount::of_another(int file, int slot) {
  struct stat status{};
  if (slot < 0 || slot >= kSlots || fstat(file, &status) != 0 ||
      status.st_size < static_cast<off_t>(sizeof(HostAccount::Ledger))) {
    throw Error(ErrorKind::configuration, "descriptor " + std::to_string(file) + " is no host device account");
  }
  std::shared_ptr<HostAccount> account(new HostAccount("", file));
  account->map_ledger();
  account->slot_ = slot;
  account->own_ = false;
  return account;
}

HostAccount::HostAccount(std::string path, int file) : path_(std::move(path)), file_(file) {}

HostAccount::HostAccount(std::string path, int file, std::size_t capacity_bytes) : path_(std::move(path)), file_(file) {
  try {
    join(capacity_bytes);
  } catch (...) {
    if (ledger_ != nullptr) munmap(ledger_, sizeof(Ledger));
    close(file_);
    throw;
  }
}

void HostAccount::map_ledger() {
  void* memory = mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) throw failure("cannot be mapped", path_);
  ledger_ = static_cast<Ledger*>(memory);
}

void HostAccount::join(std::size_t capacity_bytes) {
  const Guard guard(*this);
  if (ftruncate(file_, sizeof(Ledger)) != 0) throw failure("cannot be sized", path_);
  map_ledger();
  int free_slot = -1;
  bool alone = true;
  const int slots = path_.empty() ? 1 : kSlots;  // a private account has nobody else to look for
  for (int slot = 0; slot < slots; ++slot) {
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
  ledger_->clear(free_slot);
  auto lock = record(1 + free_slot, F_WRLCK);
  if (fcntl(file_, F_SETLK, &lock) != 0) throw failure("cannot lock a slot", path_);
  slot_ = free_slot;
}

HostAccount::~HostAccount() {
  leave();
  if (ledger_ != nullptr) munmap(ledger_, sizeof(Ledger));
  close(file_);
}

void HostAccount::leave() noexcept {
  if (path_.empty() || !own_) return;
  try {
    const Guard guard(*this);
    ledger_->clear(slot_);
    left_ = true;
    bool alone = true;
    for (int slot = 0; slot < kSlots; ++slot) alone = alone && (slot == slot_ || !slot_lives(slot));
    if (alone) unlink(path_.c_str());
    path_.clear();
  } catch (const Error&) {
    // The kernel drops our slot with the descriptor; the file stays and is taken over.
  }
}

bool HostAccount::slot_lives(int slot) const {
  if (own_ && slot == slot_) return true;
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

std::size_t HostAccount::free_bytes() {
  const std::size_t used = sum_of_the_living();
  return ledger_->capacity_bytes > used ? ledger_->capacity_bytes - used : 0;
}

void HostAccount::take(std::size_t bytes) {
  auto& state = ledger_->hibernations[slot_].state;
  for (;;) {
    {
      const Guard guard(*this);
      if (left_) throw Error(ErrorKind::driver, "the process is ending");
      if (state == static_cast<std::uint32_t>(State::running)) {
        const std::size_t free = free_bytes();
        if (bytes > free) {
          throw Error::from_driver(ErrorKind::out_of_device_memory, "create", "OUT_OF_MEMORY",
                                   "the host device is full")
              .with_memory(bytes, free);
        }
        ledger_->slots[slot_].used_bytes += bytes;
        return;
      }
    }
    for (std::uint32_t now = state; now != static_cast<std::uint32_t>(State::running); now = state) {
      wait_while(state, now);
    }
  }
}

void HostAccount::give(std::size_t bytes) {
  const Guard guard(*this);
  if (left_) return;
  auto& hibernation = ledger_->hibernations[slot_];
  // A process that failed for good may have been lost before its bytes were moved, or after.
  (hibernation.kept_bytes >= bytes ? hibernation.kept_bytes : ledger_->slots[slot_].used_bytes) -= bytes;
}

HostAccount::State HostAccount::state() {
  const Guard guard(*this);
  return static_cast<State>(ledger_->hibernations[slot_].state.load());
}

// Only with the guard.
void HostAccount::step(const char* call, State from, State to) {
  auto& word = ledger_->hibernations[slot_].state;
  const auto now = static_cast<State>(word.load());
  if (now != from) {
    throw Error::from_driver(ErrorKind::driver, call, "ILLEGAL_STATE", std::string("the process is ") + name_of(now));
  }
  word = static_cast<std::uint32_t>(to);
  wake_all(word);
}

void HostAccount::lock() {
  const Guard guard(*this);
  step("lock", State::running, State::locked);
}

void HostAccount::checkpoint() {
  const Guard guard(*this);
  step("checkpoint", State::locked, State::checkpointed);
  ledger_->hibernations[slot_].kept_bytes = ledger_->slots[slot_].used_bytes;
  ledger_->slots[slot_].used_bytes = 0;
}

void HostAccount::restore() {
  const Guard guard(*this);
  auto& hibernation = ledger_->hibernations[slot_];
  const std::size_t free = free_bytes();
  if (hibernation.state == static_cast<std::uint32_t>(State::checkpointed) && hibernation.kept_bytes > free) {
    throw Error::from_driver(ErrorKind::out_of_device_memory, "restore", "OUT_OF_MEMORY", "the host device is full")
        .with_memory(hibernation.kept_bytes, free);
  }
  step("restore", State::checkpointed, State::locked);
  ledger_->slots[slot_].used_bytes = hibernation.kept_bytes;
  hibernation.kept_bytes = 0;
}

void HostAccount::unlock() {
  const Guard guard(*this);
  step("unlock", State::locked, State::running);
}

void HostAccount::lose() {
  const Guard guard(*this);
  ledger_->hibernations[slot_].state = static_cast<std::uint32_t>(State::failed);
}

std::size_t HostAccount::used_bytes() {
  const Guard guard(*this);
  return sum_of_the_living();
}

std::size_t HostAccount::capacity_bytes() const noexcept { return ledger_->capacity_bytes; }

}  // namespace memsaver
