#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

namespace memsaver {

// How much of a host device is taken, by every process that names it.
//
// A named account lives in a small file in shared memory, with one slot for each process. A process proves that it
// lives by a POSIX record lock on its slot, which the kernel drops when the process ends, however it ends; so what a
// dead process held counts as free at once. The file goes with the last process that leaves cleanly; one left behind
// by a killed process holds nothing and is taken over by the next. An account without a name is private to its owner.
//
// A process can be checkpointed from outside, as the CUDA driver does it: what it holds stops counting, and what it
// asks for waits, until it is restored. Its state is in the ledger, so that any helper process finds it there.
class HostAccount {
 public:
  enum class State : std::uint32_t { running, locked, checkpointed, failed };

  // Throws ErrorKind::configuration: the file cannot be used, every slot is taken, or another process lives on the
  // account with another capacity.
  static std::shared_ptr<HostAccount> open(const std::string& name, std::size_t capacity_bytes);

  HostAccount(const HostAccount&) = delete;
  HostAccount& operator=(const HostAccount&) = delete;
  ~HostAccount();

  // The account of another process, which holds `slot` of it: for a helper that inherited the descriptor `file`.
  // Throws ErrorKind::configuration: the descriptor is no account's, or it has no such slot.
  static std::shared_ptr<HostAccount> of_another(int file, int slot);

  // Takes `bytes`; throws ErrorKind::out_of_device_memory, with nothing taken, where they are not free. Waits while the
  // process is not running.
  void take(std::size_t bytes);
  // Never waits: what is given back while checkpointed is not taken again at the restore.
  void give(std::size_t bytes);
  [[nodiscard]] std::size_t used_bytes();
  [[nodiscard]] std::size_t capacity_bytes() const noexcept;

  // What a helper needs for of_another().
  [[nodiscard]] int file() const noexcept { return file_; }
  [[nodiscard]] int slot() const noexcept { return slot_; }

  // The process's state, and the steps from one to the next. A step from a state that is not the one before it throws
  // ErrorKind::driver and changes nothing.
  [[nodiscard]] State state();
  void lock();        // running -> locked
  void checkpoint();  // locked -> checkpointed
  // checkpointed -> locked. Throws ErrorKind::out_of_device_memory, still checkpointed, where others hold the memory.
  void restore();
  void unlock();  // locked -> running
  // For tests: the process counts as one that cannot be restored.
  void lose();

 private:
  struct Ledger;
  struct Registry;
  class Guard;
  HostAccount(std::string path, int file);
  HostAccount(std::string path, int file, std::size_t capacity_bytes);
  void map_ledger();
  void join(std::size_t capacity_bytes);
  // What the process holds stops counting, and the file goes where nobody else lives. Nothing the second time.
  void leave() noexcept;
  void step(const char* call, State from, State to);
  std::size_t free_bytes();
  std::size_t sum_of_the_living();
  bool slot_lives(int slot) const;

  std::string path_;
  int file_;
  Ledger* ledger_ = nullptr;
  int slot_ = -1;
  bool own_ = true;    // the slot is this process's
  bool left_ = false;  // nothing counts any more, whatever other threads still take and give
  std::mutex mutex_;   // record locks belong to the process: its threads exclude each other here
};

}  // namespace memsaver
