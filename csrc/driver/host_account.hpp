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
class HostAccount {
 public:
  // Throws ErrorKind::configuration: the file cannot be used, every slot is taken, or another process lives on the
  // account with another capacity.
  static std::shared_ptr<HostAccount> open(const std::string& name, std::size_t capacity_bytes);

  HostAccount(const HostAccount&) = delete;
  HostAccount& operator=(const HostAccount&) = delete;
  ~HostAccount();

  // Takes `bytes`; throws ErrorKind::out_of_device_memory, with nothing taken, where they are not free.
  void take(std::size_t bytes);
  void give(std::size_t bytes);
  [[nodiscard]] std::size_t used_bytes();
  [[nodiscard]] std::size_t capacity_bytes() const noexcept;

 private:
  struct Ledger;
  class Guard;
  HostAccount(std::string path, int file, std::size_t capacity_bytes);
  void join(std::size_t capacity_bytes);
  std::size_t sum_of_the_living();
  bool slot_lives(int slot) const;

  std::string path_;
  int file_;
  Ledger* ledger_ = nullptr;
  int slot_ = -1;
  std::mutex mutex_;  // record locks belong to the process: its threads exclude each other here
};

}  // namespace memsaver
