#include "backup/shared_door.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "support/error.hpp"
#include "support/scope_exit.hpp"

namespace memsaver {

namespace {

using std::chrono::milliseconds;
using DoorClock = std::chrono::steady_clock;

constexpr int kNames = 96;          // more than a store has members: a name may be taken by a stranger
constexpr milliseconds kPause{20};  // before what failed is tried again

std::string prefix_of(const std::string& store) {
  constexpr char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
  if (store.empty() || store.size() > 64 || store.find_first_not_of(plain) != std::string::npos) {
    throw Error(ErrorKind::configuration,
                "MEMSAVER_SHARED_BACKUPS: the name '" + store + "' must be 1 to 64 letters, digits, '-', '_' and '.'");
  }
  return "memsaver-backups/" + std::to_string(geteuid()) + "/" + store + "/";
}

// Calls bind(2) or connect(2) with a name in the abstract namespace: a zero byte, then the text.
bool at_name(int (*call)(int, const sockaddr*, socklen_t), int file, const std::string& text) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, text.data(), text.size());
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return call(file, reinterpret_cast<const sockaddr*>(&address), bytes) == 0;
}

int open_socket(int flags = 0) { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | flags, 0); }

milliseconds left_until(DoorClock::time_point until) {
  return std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(until - DoorClock::now()));
}

bool is_of_this_user(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

// One byte with a descriptor beside it.
struct Parcel {
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  Parcel() {
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
  }
};

void send_descriptor(int socket, int file) {
  Parcel parcel;
  cmsghdr* const header = CMSG_FIRSTHDR(&parcel.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof file);
  std::memcpy(CMSG_DATA(header), &file, sizeof file);
  (void)!sendmsg(socket, &parcel.message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

int receive_descriptor(int socket) {
  Parcel parcel;
  if (recvmsg(socket, &parcel.message, MSG_CMSG_CLOEXEC) != 1) return -1;
  const cmsghdr* const header = CMSG_FIRSTHDR(&parcel.message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof(int))) return -1;
  int file = -1;
  std::memcpy(&file, CMSG_DATA(header), sizeof file);
  return file;
}

void close_and_forget(int& file) {
  if (file >= 0) close(file);
  file = -1;
}

}  // namespace

StoreDoor::StoreDoor(const std::string& store) : prefix_(prefix_of(store)) {}

StoreDoor::~StoreDoor() { abandon(); }

void StoreDoor::abandon() {
  close_and_forget(gate_);
  close_and_forget(listener_);
}

bool StoreDoor::enter_gate(milliseconds patience) {
  gate_ = open_socket();
  const auto until = DoorClock::now() + patience;
  while (gate_ >= 0 && !at_name(bind, gate_, prefix_ + "gate")) {
    if (errno != EADDRINUSE || DoorClock::now() > until) {
      close_and_forget(gate_);
      break;
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
  return gate_ >= 0;
}

void StoreDoor::leave_gate() { close_and_forget(gate_); }

// A process that is busy answers later, one that is ending closes its end, and then its name is free: only if no name
// is taken is there no store.
std::optional<int> StoreDoor::ask(milliseconds patience) {
  const auto until = DoorClock::now() + patience;
  for (;;) {
    const Asked asked = ask_all(left_until(until));
    if (asked.file >= 0) return asked.file;
    if (!asked.any) return -1;
    if (DoorClock::now() >= until) return std::nullopt;
    std::this_thread::sleep_for(kPause);
  }
}

// Asks all processes at once, so that those that are stopped cost no time. Returns when one has answered, or all that
// were asked have closed their ends.
StoreDoor::Asked StoreDoor::ask_all(milliseconds patience) const {
  const auto until = DoorClock::now() + patience;
  Asked asked;
  std::vector<pollfd> sockets;
  const ScopeExit at_end([&] {
    for (const auto& each : sockets) close(each.fd);
  });
  int socket = -1;
  for (int i = 0; i < kNames; ++i) {
    if (socket < 0) socket = open_socket(SOCK_NONBLOCK);
    if (!at_name(connect, socket, prefix_ + std::to_string(i))) {
      asked.any = asked.any || errno != ECONNREFUSED;  // also if there is no descriptor for a socket
      continue;
    }
    if (is_of_this_user(socket)) {
      asked.any = true;
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
    if (ready <= 0) return asked;
    for (std::size_t i = sockets.size(); i-- > 0;) {
      if (sockets[i].revents == 0) continue;
      asked.file = receive_descriptor(sockets[i].fd);
      if (asked.file >= 0) return asked;
      close(sockets[i].fd);
      sockets.erase(sockets.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return asked;
}

bool StoreDoor::listen() {
  listener_ = open_socket();
  if (listener_ < 0) return false;
  for (int i = 0; i < kNames; ++i) {
    if (at_name(bind, listener_, prefix_ + std::to_string(i))) return ::listen(listener_, kNames) == 0;
  }
  return false;
}

void StoreDoor::serve(int file, milliseconds at_most) {
  const auto until = DoorClock::now() + at_most;
  for (;;) {
    pollfd guests{listener_, POLLIN, 0};
    const int ready = poll(&guests, 1, static_cast<int>(left_until(until).count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return;
    const int guest = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (guest >= 0) {
      if (is_of_this_user(guest)) send_descriptor(guest, file);
      close(guest);
    } else if (errno == EINVAL) {
      return;  // stopped
    } else if (errno != EINTR && errno != ECONNABORTED) {
      std::this_thread::sleep_for(kPause);  // without descriptors: the guest waits
      if (DoorClock::now() >= until) return;
    }
  }
}

void StoreDoor::stop() { shutdown(listener_, SHUT_RDWR); }

int make_store_file(std::size_t bytes) {
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

bool is_store_file(int file, std::size_t bytes) {
  struct stat about{};
  if (fstat(file, &about) != 0 || !S_ISREG(about.st_mode) || about.st_uid != geteuid()) return false;
  const int seals = fcntl(file, F_GET_SEALS);
  return (about.st_mode & 0777) == 0600 && seals >= 0 && (seals & F_SEAL_SHRINK) != 0 &&
         about.st_size == static_cast<off_t>(bytes);
}

}  // namespace memsaver
