#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "support/error.hpp"

namespace memsaver {

// The content of the file behind a HostAccount. Zeros are its initial state.
struct HostLedger {
  static constexpr int kSlots = 256;

  std::uint64_t capacity_bytes;
  struct Slot {
    std::uint64_t used_bytes;
  } slots[kSlots];
  struct Hibernation {
    std::atomic<std::uint32_t> state;  // a HostAccount::State, and a futex for processes that wait for a change
    std::uint32_t reserved;
    std::uint64_t kept_bytes;  // held by the process while it is checkpointed; not in used_bytes
  } hibernations[kSlots];

  void clear(int slot) {
    slots[slot].used_bytes = 0;
    hibernations[slot].kept_bytes = 0;
    hibernations[slot].state = 0;
  }
};

// That file, open and mapped. Byte 0 is locked by the process that uses the content, byte 1 + i by the process that
// holds slot i for as long as it lives: POSIX record locks, which the kernel drops with the process.
class HostLedgerFile {
 public:
  // "/dev/shm/memsaver-<uid>-<name>". Throws ErrorKind::configuration if the name has other characters than letters,
  // digits, '-', '_' and '.'.
  [[nodiscard]] static std::string path_of(const std::string& name);

  // Owns the descriptor `file`, also when it throws. `path` is empty for a private file. All functions but the
  // destructor and slot_is_taken() throw ErrorKind::configuration on failure.
  HostLedgerFile(std::string path, int file) : path_(std::move(path)), file_(file) {}
  HostLedgerFile(const HostLedgerFile&) = delete;
  ~HostLedgerFile();

  void resize();
  void map();
  [[nodiscard]] HostLedger* operator->() const { return ledger_; }

  [[nodiscard]] int descriptor() const { return file_; }
  [[nodiscard]] const std::string& path() const { return path_; }
  // False if the file has been deleted.
  [[nodiscard]] bool has_name() const;
  void remove();  // deletes the file, which stays usable, without a path
  void forget_path() { path_.clear(); }

  void lock();
  void unlock();
  // True if another process holds the slot.
  [[nodiscard]] bool slot_is_taken(int slot) const;
  void take_slot(int slot);

  // The Error for a failed system call on the file; reads errno.
  [[nodiscard]] static Error failure(const std::string& path, const char* what);

 private:
  std::string path_;
  const int file_;
  HostLedger* ledger_ = nullptr;
};

// Waits until `word` is not `value`, or returns early. Between processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value);
void futex_wake_all(std::atomic<std::uint32_t>& word);

}  // namespace memsaver
