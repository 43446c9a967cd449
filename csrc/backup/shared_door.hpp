#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>

namespace memsaver {

// How processes of one user find the memory file of a store: by abstract Unix sockets, whose names end with the process
// that has them. Every process of a store listens under a name of its own and hands the file's descriptor to those of
// its user that connect.
class StoreDoor {
 public:
  // Throws ErrorKind::configuration unless `store` is 1 to 64 letters, digits, '-', '_' and '.'.
  explicit StoreDoor(const std::string& store);
  StoreDoor(const StoreDoor&) = delete;
  StoreDoor& operator=(const StoreDoor&) = delete;
  ~StoreDoor();

  // Enters alone: until leave_gate() no other process looks for the store. False if others were in the way all the
  // time.
  [[nodiscard]] bool enter_gate(std::chrono::milliseconds patience);
  void leave_gate();

  // The descriptor of the store's file from any process that has it; -1 if there is no such process. Nothing if there
  // are some, and none of them answered for so long.
  [[nodiscard]] std::optional<int> ask(std::chrono::milliseconds patience);
  // Listens. False if no name is left, or the system refuses a socket.
  [[nodiscard]] bool listen();
  // Hands `file` to those that connect, at least to those that wait now, until stop() or for `at_most`.
  void serve(int file, std::chrono::milliseconds at_most);
  // Ends serve(), in whichever thread it runs. Nobody can connect from now on.
  void stop();
  // In a forked child: closes what it inherited, so that it keeps no name.
  void abandon();

 private:
  struct Asked {
    bool any = false;  // a process has one of the names
    int file = -1;
  };
  [[nodiscard]] Asked ask_all(std::chrono::milliseconds patience) const;

  const std::string prefix_;
  int gate_ = -1;
  int listener_ = -1;
};

// A file in memory that only this user can open, with a size that nobody can change. -1 with errno set on failure.
[[nodiscard]] int make_store_file(std::size_t bytes);
// Whether a descriptor that another process sent is such a file of this user.
[[nodiscard]] bool is_store_file(int file, std::size_t bytes);

}  // namespace memsaver
