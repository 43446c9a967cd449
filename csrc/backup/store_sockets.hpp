#pragma once

#include <chrono>
#include <optional>
#include <string>

namespace memsaver {

// Owns the Unix sockets by which processes of one user hand each other the descriptor of a store's memory file. Their
// names are abstract: a name ends with the process that has it. Every process of a store listens under a separate name,
// and sends the descriptor to those of its user that connect. One thread at a time, except stop().
class StoreSockets {
 public:
  // Throws configuration unless `store` is 1 to 64 letters, digits, '-', '_' and '.'.
  explicit StoreSockets(const std::string& store);
  StoreSockets(const StoreSockets&) = delete;
  ~StoreSockets() { close_all(); }

  // Excludes other processes that look for the store, until unlock(). Returns false if they held the lock for
  // `timeout`, or the system refuses a socket.
  [[nodiscard]] bool lock(std::chrono::milliseconds timeout);
  void unlock();

  // Returns the descriptor of the store's file from any process that has it; -1 if there is no such process; nothing if
  // there are some, and none of them answered within `timeout`.
  [[nodiscard]] std::optional<int> request(std::chrono::milliseconds timeout);
  // Returns false if no name is free, or the system refuses a socket.
  [[nodiscard]] bool listen();
  // Sends `file` to the processes that connect, at least to those that wait now, until stop() or for `at_most`.
  void serve(int file, std::chrono::milliseconds at_most);
  // Ends serve(), in any thread, and refuses connections from now on.
  void stop();
  // Closes all sockets: a forked child must keep no name.
  void close_all();

 private:
  // As request(), once.
  [[nodiscard]] std::optional<int> request_from_all(std::chrono::milliseconds timeout) const;

  const std::string prefix_;
  int lock_ = -1;
  int listener_ = -1;
};

// Returns a file in memory that only this user can open, with a size that no process can change; -1 with errno set on
// failure.
[[nodiscard]] int make_store_file(std::size_t bytes);
// Returns whether a descriptor that another process sent is of such a file of this user.
[[nodiscard]] bool is_store_file(int file, std::size_t bytes);

}  // namespace memsaver
