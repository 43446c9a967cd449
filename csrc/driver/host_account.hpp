#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "support/mutex.hpp"

namespace memsaver {

// Owns one process's slot in the account of a host device: how much each process that names it uses. Any thread may
// call any function. Each throws configuration if the file cannot be locked, and has no effect then.
//
// A named account is a small file in shared memory with one slot per process. What a process holds is free as soon as
// it is dead: the kernel drops its lock on the slot. The last process that exits normally deletes the file; one left by
// a killed process is reused. An account without a name is private to its owner.
//
// Through the state in the file, a helper process can checkpoint another process, as the CUDA driver does. Until that
// process is restored, what it holds does not count, and its requests wait.
class HostAccount {
 public:
  enum class State : std::uint32_t { running, locked, checkpointed };

  // Returns the same object for the same name in one process. Throws configuration if the file cannot be used, every
  // slot is taken, or another process uses the account with another capacity.
  static std::shared_ptr<HostAccount> open(const std::string& name, std::size_t capacity_bytes);

  // Returns the account of another process, which holds `slot`, for a helper that inherited the descriptor `file`.
  // Throws configuration if the descriptor is not of an account, or it has no such slot.
  static std::shared_ptr<HostAccount> of_another(int file, int slot);

  ~HostAccount();

  // Waits while the process is not running. Throws out_of_device_memory if `bytes` are not free, driver if the process
  // is ending: nothing is taken.
  void take(std::size_t bytes);
  // Does not wait until the process is running: restore() does not take again what is returned while it is
  // checkpointed.
  void give(std::size_t bytes);
  // Returns what no living process uses.
  [[nodiscard]] std::size_t free_bytes();
  [[nodiscard]] std::size_t capacity_bytes() const noexcept;

  // The arguments for of_another().
  [[nodiscard]] int file() const noexcept { return file_; }
  [[nodiscard]] int slot() const noexcept { return slot_; }

  // The process's state, and the steps between states. From another state a step throws driver: nothing has changed.
  [[nodiscard]] State state();
  void lock();        // running -> locked
  void checkpoint();  // locked -> checkpointed
  void restore();     // checkpointed -> locked; throws out_of_device_memory if others hold the memory
  void unlock();      // locked -> running

 private:
  struct Ledger;
  struct Registry;
  class Guard;
  // Owns the descriptor `file`. `path` is empty for a private file.
  HostAccount(std::string path, int file) : path_(std::move(path)), file_(file) {}
  void map();
  void join(std::size_t capacity_bytes);
  void leave() noexcept;
  void step(const char* call, State from, State to) REQUIRES(mutex_);
  [[nodiscard]] std::size_t free_now() REQUIRES(mutex_);
  [[nodiscard]] bool slot_lives(int slot) const;

  std::string path_;
  const int file_;
  Ledger* ledger_ = nullptr;  // its content: only within a Guard, except capacity_bytes and states
  int slot_ = -1;
  bool own_ = true;  // the slot is this process's
  Mutex mutex_;      // record locks belong to the process: this excludes its threads from each other
  bool left_ GUARDED_BY(mutex_) = false;  // then what other threads take and give does not count
};

[[nodiscard]] const char* name_of(HostAccount::State state);

}  // namespace memsaver
