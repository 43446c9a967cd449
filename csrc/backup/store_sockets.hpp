#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>

#include "support/cleanup.hpp"
#include "support/error.hpp"

namespace memsaver {

// Owns the Unix sockets by which processes of one user hand each other the descriptor of a store's memory file. Each
// process listens under a separate abstract name, free once it ends. One thread at a time, except stop(); what is about
// links likewise, but another thread.
class StoreSockets {
 public:
  // Throws configuration unless `store` is 1 to 64 letters, digits, '-', '_' and '.'.
  explicit StoreSockets(const std::string& store) : prefix_(prefix_of(store)) {}
  StoreSockets(const StoreSockets&) = delete;
  ~StoreSockets() { close_all(); }

  // Excludes others that look for the store, until unlock(). Returns false after `timeout`, or without a socket.
  [[nodiscard]] bool lock(std::chrono::milliseconds timeout) {
    lock_ = open_socket();
    const auto until = Clock::now() + timeout;
    while (lock_ >= 0 && !at_name(bind, lock_, prefix_ + kLockName)) {
      if (errno != EADDRINUSE || Clock::now() > until) {
        close_and_forget(lock_);
        break;
      }
      std::this_thread::sleep_for(milliseconds(1));
    }
    return lock_ >= 0;
  }
  void unlock() { close_and_forget(lock_); }

  // Returns the descriptor of the store's file from any process that has it; -1 if no name is taken: there is no store.
  // Returns nothing if none answers within `timeout`: they are busy. One that ends closes its end and frees its name.
  [[nodiscard]] std::optional<int> request(std::chrono::milliseconds timeout) {
    const auto until = Clock::now() + timeout;
    for (;;) {
      if (const auto found = request_from_all(left_until(until))) return found;
      if (Clock::now() >= until) return std::nullopt;
      std::this_thread::sleep_for(kPause);
    }
  }
  // Returns false if no name is free, or the system refuses a socket.
  [[nodiscard]] bool listen() {
    listener_ = open_socket();
    if (listener_ < 0) return false;
    for (int i = 0; i < kNames; ++i) {
      if (at_name(bind, listener_, prefix_ + std::to_string(i))) return ::listen(listener_, kNames) == 0;
    }
    return false;
  }
  // Sends `file` to the processes that connect, at least to those that wait now, until stop() or for `at_most`. Returns
  // false after stop().
  bool serve(int file, std::chrono::milliseconds at_most) {
    const auto until = Clock::now() + at_most;
    for (;;) {
      pollfd waiting{listener_, POLLIN, 0};
      const int ready = poll(&waiting, 1, static_cast<int>(left_until(until).count()));
      if (ready < 0 && errno == EINTR) continue;
      if (ready <= 0) return true;
      const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      if (client >= 0) {
        if (is_of_this_user(client)) send_descriptor(client, file);
        close(client);
      } else if (errno == EINVAL) {
        return false;
      } else if (errno != EINTR && errno != ECONNABORTED) {
        std::this_thread::sleep_for(kPause);  // no descriptor is free: the client waits
        if (Clock::now() >= until) return true;
      }
    }
  }
  // Ends serve(), in any thread, and refuses connections from now on.
  void stop() { shutdown(listener_, SHUT_RDWR); }

  // Offers the link of a member to others (backup/links.hpp), by connections of whole messages, until end_offer().
  // Returns false if the system refuses.
  [[nodiscard]] bool offer_link(std::uint32_t member) {
    offer_ = open_socket(SOCK_NONBLOCK, SOCK_SEQPACKET);
    if (offer_ < 0 || !at_name(bind, offer_, link_name(member)) || ::listen(offer_, 1) != 0) close_and_forget(offer_);
    return offer_ >= 0;
  }
  // Ends accept_link() and await(), in any thread, and refuses connections to the offer from now on.
  void end_offer() { shutdown(offer_, SHUT_RDWR); }
  // Closes the socket of an offer that has ended, which no thread uses.
  void close_offer() { close_and_forget(offer_); }
  // Returns whether a connection to the offer waits, or the offer has ended.
  [[nodiscard]] bool link_is_wanted() const { return readable(offer_, milliseconds(0)); }
  // Returns a connection of a process of this user to the offer; -1 if there is none within `timeout`.
  [[nodiscard]] int accept_link(std::chrono::milliseconds timeout) const {
    if (!readable(offer_, timeout)) return -1;
    int client = accept4(offer_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (client < 0 && errno != EINVAL) std::this_thread::sleep_for(kPause);  // no descriptor is free
    if (client >= 0 && !is_of_this_user(client)) close_and_forget(client);
    return client;
  }
  // Waits for something to read from a connection to the offer, its end included; a signal may end that. Returns false
  // after `timeout`, or once the offer has ended.
  [[nodiscard]] bool await(int connection, std::chrono::milliseconds timeout) const {
    pollfd waiting[] = {{connection, POLLIN, 0}, {offer_, 0, 0}};  // the offer's end is always seen
    return poll(waiting, 2, static_cast<int>(timeout.count())) != 0 && waiting[1].revents == 0;
  }
  // Returns a connection to the offer of another member; -1 if it has none, is busy, or the system refuses.
  [[nodiscard]] int borrow_link(std::uint32_t member) const {
    int file = open_socket(SOCK_NONBLOCK, SOCK_SEQPACKET);
    if (file < 0 || !at_name(connect, file, link_name(member)) || !is_of_this_user(file)) close_and_forget(file);
    return file;
  }
  // Returns whether there is something to read, or the other end is closed, within `timeout`.
  [[nodiscard]] static bool readable(int socket, std::chrono::milliseconds timeout) {
    pollfd waiting{socket, POLLIN, 0};
    return poll(&waiting, 1, static_cast<int>(timeout.count())) > 0;
  }
  [[nodiscard]] static int receive_descriptor(int socket) {
    Message message;
    if (recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC) != 1) return -1;
    const cmsghdr* const header = CMSG_FIRSTHDR(&message.header);
    if (header == nullptr || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof(int))) return -1;
    int file = -1;
    std::memcpy(&file, CMSG_DATA(header), sizeof file);
    return file;
  }
  static void send_descriptor(int socket, int file) {
    Message message;
    cmsghdr* const header = CMSG_FIRSTHDR(&message.header);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof file);
    std::memcpy(CMSG_DATA(header), &file, sizeof file);
    (void)!sendmsg(socket, &message.header, MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  // Closes all sockets: a forked child must keep no name.
  void close_all() {
    close_and_forget(lock_);
    close_and_forget(listener_);
    close_and_forget(offer_);
  }

 private:
  using milliseconds = std::chrono::milliseconds;
  using Clock = std::chrono::steady_clock;

  static constexpr int kNames = 96;            // more than a store has members: another user may have taken some
  static constexpr milliseconds kPause{20};    // before what failed is tried again
  static constexpr char kLockName[] = "gate";  // what other versions of memsaver use, too

  static std::string prefix_of(const std::string& store) {
    check_name("MEMSAVER_SHARED_BACKUPS", store);
    return "memsaver-backups/" + std::to_string(geteuid()) + "/" + store + "/";
  }

  // Calls bind(2) or connect(2) with a name in the abstract namespace: a zero byte, then the text.
  static bool at_name(int (*call)(int, const sockaddr*, socklen_t), int file, const std::string& text) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, text.data(), text.size());
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
    return call(file, reinterpret_cast<const sockaddr*>(&address), bytes) == 0;
  }

  [[nodiscard]] std::string link_name(std::uint32_t member) const { return prefix_ + "link/" + std::to_string(member); }

  static int open_socket(int flags = 0, int kind = SOCK_STREAM) {
    return socket(AF_UNIX, kind | SOCK_CLOEXEC | flags, 0);
  }

  static milliseconds left_until(Clock::time_point until) {
    return std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(until - Clock::now()));
  }

  static bool is_of_this_user(int socket) {
    ucred peer{};
    socklen_t bytes = sizeof peer;
    return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
  }

  // A message of one byte and a descriptor.
  struct Message {
    char byte = 0;
    iovec part{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr header{};
    Message() {
      header.msg_iov = &part;
      header.msg_iovlen = 1;
      header.msg_control = control;
      header.msg_controllen = sizeof control;
    }
  };

  static void close_and_forget(int& file) {
    if (file >= 0) close(file);
    file = -1;
  }

  // As request(): asks all processes at once, so that stopped ones cost no time, until one answers or all have closed.
  [[nodiscard]] std::optional<int> request_from_all(std::chrono::milliseconds timeout) const {
    const auto until = Clock::now() + timeout;
    bool any = false;  // a process has one of the names
    std::vector<pollfd> sockets;
    const Cleanup at_end([&] {
      for (const auto& each : sockets) close(each.fd);
    });
    int socket = -1;
    for (int i = 0; i < kNames; ++i) {
      if (socket < 0) socket = open_socket(SOCK_NONBLOCK);
      if (!at_name(connect, socket, prefix_ + std::to_string(i))) {
        any = any || errno != ECONNREFUSED;  // also if there is no descriptor for a socket
        continue;
      }
      if (is_of_this_user(socket)) {
        any = true;
        sockets.push_back({std::exchange(socket, -1), POLLIN, 0});
      } else {
        close_and_forget(socket);
      }
    }
    close_and_forget(socket);
    while (!sockets.empty()) {
      const auto left = left_until(until);
      const int ready = poll(sockets.data(), sockets.size(), static_cast<int>(left.count()));
      if (ready < 0 && errno == EINTR) continue;
      if (ready <= 0) break;
      for (std::size_t i = sockets.size(); i-- > 0;) {
        if (sockets[i].revents == 0) continue;
        if (const int file = receive_descriptor(sockets[i].fd); file >= 0) return file;
        close(sockets[i].fd);
        sockets.erase(sockets.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
    return any ? std::nullopt : std::optional(-1);
  }

  const std::string prefix_;
  int lock_ = -1;
  int listener_ = -1;
  int offer_ = -1;
};

// Returns a file in memory for this user alone, whose size no process can change; -1 with errno set on failure.
[[nodiscard]] inline int make_store_file(std::size_t bytes) {
  const int file = memfd_create("memsaver-backups", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0) return -1;
  if (fchmod(file, 0600) == 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0 &&
      fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
    return file;
  }
  const int code = errno;
  close(file);
  errno = code;
  return -1;
}
// Returns whether a descriptor that another process sent is of such a file of this user.
[[nodiscard]] inline bool is_store_file(int file, std::size_t bytes) {
  struct stat about{};
  if (fstat(file, &about) != 0 || !S_ISREG(about.st_mode) || about.st_uid != geteuid()) return false;
  const int seals = fcntl(file, F_GET_SEALS);
  return (about.st_mode & 0777) == 0600 && seals >= 0 && (seals & F_SEAL_SHRINK) != 0 &&
         about.st_size == static_cast<off_t>(bytes);
}

}  // namespace memsaver
