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
#include <map>

#include "support/error.hpp"

namespace memsaver {

namespace {

constexpr int kSlots = 256;

// Returns the Error of a failed system call on the file; reads errno.
Error failure(const std::string& path, const char* what) {
  return {ErrorKind::configuration, "host device account " + path + ": " + what + " (" + std::strerror(errno) + ")"};
}

// POSIX record locks, which the kernel drops with the process: byte 0 is locked by the process that uses the content,
// byte 1 + i by the process that holds slot i for as long as it lives.
struct flock record_lock(off_t byte, short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  return lock;
}

// Without FUTEX_PRIVATE_FLAG: the word is shared between processes.
void futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
}

}  // namespace

// The content of the file. Zeros are its initial state.
struct HostAccount::Ledger {
  std::uint64_t capacity_bytes;
  std::uint64_t used_bytes[kSlots];
  struct Hibernation {
    std::atomic<std::uint32_t> state;  // a State, and a futex for processes that wait for a change
    std::uint32_t reserved;
    std::uint64_t kept_bytes;  // held by the process while it is checkpointed; not in used_bytes
  } hibernations[kSlots];

  void clear(int slot) {
    used_bytes[slot] = 0;
    hibernations[slot].kept_bytes = 0;
    hibernations[slot].state = 0;
  }
};

const char* name_of(HostAccount::State state) {
  constexpr const char* names[] = {"running", "locked", "checkpointed"};
  return names[static_cast<std::uint32_t>(state)];
}

// Excludes other threads and other processes.
class MEMSAVER_THREAD_ANNOTATION(scoped_lockable) HostAccount::Guard {
 public:
  explicit Guard(HostAccount& account) ACQUIRE(account.mutex_) : threads_(account.mutex_), file_(account.file_) {
    auto lock = record_lock(0, F_WRLCK);
    while (fcntl(file_, F_SETLKW, &lock) != 0) {
      if (errno != EINTR) throw failure(account.path_, "cannot be locked");
    }
  }
  ~Guard() RELEASE() {
    auto lock = record_lock(0, F_UNLCK);
    fcntl(file_, F_SETLK, &lock);
  }

 private:
  const Lock<> threads_;
  const int file_;
};

// One account for each name in this process: closing any descriptor of a file drops all of its locks on the file.
struct HostAccount::Registry {
  Mutex mutex;
  // By process and name: a forked child does not inherit record locks, so it needs separate accounts.
  std::map<std::pair<pid_t, std::string>, std::weak_ptr<HostAccount>> accounts GUARDED_BY(mutex);

  static Registry& instance() {
    static auto* const registry = new Registry;
    // The interpreter does not destroy its objects at exit. This handler deletes the file.
    static const int at_exit = std::atexit(leave_all);
    static_cast<void>(at_exit);
    return *registry;
  }

  static void leave_all() {
    Registry& registry = instance();
    if (!registry.mutex.try_lock()) return;  // held by another thread, or forked while it was
    for (const auto& [key, held] : registry.accounts) {
      const auto account = key.first == getpid() ? held.lock() : nullptr;
      if (account) account->leave();
    }
    registry.mutex.unlock();
  }
};

std::shared_ptr<HostAccount> HostAccount::open(const std::string& name, std::size_t capacity_bytes) {
  if (name.empty()) {
    const int file = memfd_create("memsaver-account", MFD_CLOEXEC);
    if (file < 0) throw failure("(private)", "cannot be created");
    std::shared_ptr<HostAccount> account(new HostAccount("", file));
    account->join(capacity_bytes);
    return account;
  }
  check_name("MEMSAVER_HOST_DEVICE", name);
  const std::string path = "/dev/shm/memsaver-" + std::to_string(getuid()) + "-" + name;
  Registry& registry = Registry::instance();
  const Lock lock(registry.mutex);
  auto& known = registry.accounts[{getpid(), name}];
  if (auto account = known.lock()) return account;
  for (;;) {
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) throw failure(path, "cannot be opened");
    std::shared_ptr<HostAccount> account(new HostAccount(path, file));
    account->join(capacity_bytes);
    struct stat status{};
    if (fstat(file, &status) == 0 && status.st_nlink > 0) {
      known = account;
      return account;
    }
    // The last process deleted the file between our open and our lock: open the next one.
    account->path_.clear();
  }
}

std::shared_ptr<HostAccount> HostAccount::of_another(int file, int slot) {
  struct stat status{};
  if (slot < 0 || slot >= kSlots || fstat(file, &status) != 0 || status.st_size < static_cast<off_t>(sizeof(Ledger))) {
    throw Error(ErrorKind::configuration, "descriptor " + std::to_string(file) + " is no host device account");
  }
  std::shared_ptr<HostAccount> account(new HostAccount("", file));
  account->map();
  account->slot_ = slot;
  account->own_ = false;
  return account;
}

HostAccount::~HostAccount() {
  leave();
  if (ledger_ != nullptr) munmap(ledger_, sizeof(Ledger));
  close(file_);
}

void HostAccount::map() {
  void* const memory = mmap(nullptr, sizeof(Ledger), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (memory == MAP_FAILED) throw failure(path_, "cannot be mapped");
  ledger_ = static_cast<Ledger*>(memory);
}

// Takes a free slot. When it throws, the account may only be destroyed.
void HostAccount::join(std::size_t capacity_bytes) {
  const Guard guard(*this);
  // Allocates the pages, too: to write to one for which there is no space would end the process by SIGBUS.
  do {
    errno = posix_fallocate(file_, 0, sizeof(Ledger));
  } while (errno == EINTR);
  if (errno != 0) throw failure(path_, "cannot be sized");
  map();
  int free_slot = -1;
  bool alone = true;
  const int slots = path_.empty() ? 1 : kSlots;  // a private account has one process
  for (int slot = 0; slot < slots; ++slot) {
    if (slot_lives(slot)) {
      alone = false;
    } else if (free_slot < 0) {
      free_slot = slot;
    }
  }
  if (free_slot < 0) {
    throw Error(ErrorKind::configuration, "host device account " + path_ + ": all slots are taken");
  }
  if (!alone && ledger_->capacity_bytes != capacity_bytes) {
    throw Error(ErrorKind::configuration,
                "MEMSAVER_HOST_CAPACITY is " + std::to_string(capacity_bytes) + " bytes, but a process that shares " +
                    path_ + " uses " + std::to_string(ledger_->capacity_bytes) + ": give all of them the same value");
  }
  ledger_->capacity_bytes = capacity_bytes;
  ledger_->clear(free_slot);
  auto lock = record_lock(1 + free_slot, F_WRLCK);
  if (fcntl(file_, F_SETLK, &lock) != 0) throw failure(path_, "cannot lock a slot");
  slot_ = free_slot;
}

// Frees the slot of this process, and deletes the file if no other process uses it. Idempotent.
void HostAccount::leave() noexcept {
  if (path_.empty() || !own_ || slot_ < 0) return;
  try {
    const Guard guard(*this);
    ledger_->clear(slot_);
    left_ = true;
    bool alone = true;
    for (int slot = 0; slot < kSlots; ++slot) alone = alone && (slot == slot_ || !slot_lives(slot));
    if (alone) unlink(path_.c_str());
    path_.clear();
  } catch (const Error&) {
    // The kernel drops the slot with the descriptor; the file stays and is reused.
  }
}

bool HostAccount::slot_lives(int slot) const {
  auto lock = record_lock(1 + slot, F_WRLCK);
  return (own_ && slot == slot_) || (fcntl(file_, F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK);
}

std::size_t HostAccount::free_now() {
  std::size_t sum = 0;
  for (int slot = 0; slot < kSlots; ++slot) {
    auto& used = ledger_->used_bytes[slot];
    if (used != 0 && !slot_lives(slot)) used = 0;
    sum += used;
  }
  return ledger_->capacity_bytes > sum ? ledger_->capacity_bytes - sum : 0;
}

void HostAccount::take(std::size_t bytes) {
  auto& state = ledger_->hibernations[slot_].state;
  constexpr auto running = static_cast<std::uint32_t>(State::running);
  for (;;) {
    {
      const Guard guard(*this);
      if (left_) throw Error(ErrorKind::driver, "the process is ending");
      if (state == running) {
        const std::size_t free = free_now();
        if (bytes > free) {
          throw Error::from_driver(ErrorKind::out_of_device_memory, "create", "OUT_OF_MEMORY",
                                   "the host device is full")
              .with_memory(bytes, free);
        }
        ledger_->used_bytes[slot_] += bytes;
        return;
      }
    }
    for (std::uint32_t now = state; now != running; now = state) futex(state, FUTEX_WAIT, now);
  }
}

void HostAccount::give(std::size_t bytes) {
  const Guard guard(*this);
  if (left_) return;
  auto& kept_bytes = ledger_->hibernations[slot_].kept_bytes;
  (kept_bytes >= bytes ? kept_bytes : ledger_->used_bytes[slot_]) -= bytes;
}

HostAccount::State HostAccount::state() {
  const Guard guard(*this);
  return static_cast<State>(ledger_->hibernations[slot_].state.load());
}

void HostAccount::step(const char* call, State from, State to) {
  auto& word = ledger_->hibernations[slot_].state;
  const auto now = static_cast<State>(word.load());
  if (now != from) {
    throw Error::from_driver(ErrorKind::driver, call, "ILLEGAL_STATE", std::string("the process is ") + name_of(now));
  }
  word = static_cast<std::uint32_t>(to);
  futex(word, FUTEX_WAKE, INT_MAX);
}

void HostAccount::lock() {
  const Guard guard(*this);
  step("lock", State::running, State::locked);
}

void HostAccount::checkpoint() {
  const Guard guard(*this);
  step("checkpoint", State::locked, State::checkpointed);
  ledger_->hibernations[slot_].kept_bytes = std::exchange(ledger_->used_bytes[slot_], 0);
}

void HostAccount::restore() {
  const Guard guard(*this);
  auto& hibernation = ledger_->hibernations[slot_];
  const std::size_t free = free_now();
  if (hibernation.state == static_cast<std::uint32_t>(State::checkpointed) && hibernation.kept_bytes > free) {
    throw Error::from_driver(ErrorKind::out_of_device_memory, "restore", "OUT_OF_MEMORY", "the host device is full")
        .with_memory(hibernation.kept_bytes, free);
  }
  step("restore", State::checkpointed, State::locked);
  ledger_->used_bytes[slot_] = std::exchange(hibernation.kept_bytes, 0);
}

void HostAccount::unlock() {
  const Guard guard(*this);
  step("unlock", State::locked, State::running);
}

std::size_t HostAccount::capacity_bytes() const noexcept { return ledger_->capacity_bytes; }

std::size_t HostAccount::free_bytes() {
  const Guard guard(*this);
  return free_now();
}

}  // namespace memsaver
