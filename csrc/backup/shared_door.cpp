#include "backup/shared_door.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "support/error.hpp"
#include "support/scope_exit.hpp"

namespace memsaver {

namespace {

constexpr int kNames = 96;               // more than a store has members: a name may be taken by a stranger
constexpr timeval kAnswerTimeout{1, 0};  // for a process that listens but is stopped

std::string prefix_of(const std::string& store) {
  constexpr char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
  if (store.empty() || store.size() > 64 || store.find_first_not_of(plain) != std::string::npos) {
    throw Error(ErrorKind::configuration,
                "MEMSAVER_SHARED_BACKUPS: the name '" + store + "' must be 1 to 64 letters, digits, '-', '_' and '.'");
  }
  return "memsaver-backups/" + std::to_string(geteuid()) + "/" + store + "/";
}

struct Name {
  sockaddr_un address{};
  socklen_t bytes = 0;
};

// In the abstract namespace: a zero byte, then the text.
Name name_of(const std::string& text) {
  Name name;
  name.address.sun_family = AF_UNIX;
  std::memcpy(name.address.sun_path + 1, text.data(), text.size());
  name.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  return name;
}

int open_socket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); }

bool bind_to(int file, const std::string& text) {
  const Name name = name_of(text);
  return bind(file, reinterpret_cast<const sockaddr*>(&name.address), name.bytes) == 0;
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

StoreDoor::StoreDoor(const std::string& store) : prefix_(prefix_of(store)), stop_(eventfd(0, EFD_CLOEXEC)) {}

StoreDoor::~StoreDoor() { abandon(); }

void StoreDoor::abandon() {
  close_and_forget(gate_);
  close_and_forget(listener_);
  close_and_forget(stop_);
}

bool StoreDoor::enter_gate(std::chrono::milliseconds patience) {
  gate_ = open_socket();
  const auto until = std::chrono::steady_clock::now() + patience;
  while (gate_ >= 0 && !bind_to(gate_, prefix_ + "gate")) {
    if (errno != EADDRINUSE || std::chrono::steady_clock::now() > until) {
      close_and_forget(gate_);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return gate_ >= 0;
}

void StoreDoor::leave_gate() { close_and_forget(gate_); }

int StoreDoor::ask() {
  for (int i = 0; i < kNames; ++i) {
    const int file = ask(prefix_ + std::to_string(i));
    if (file >= 0) return file;
  }
  return -1;
}

int StoreDoor::ask(const std::string& text) const {
  int socket = open_socket();
  if (socket < 0) return -1;
  const ScopeExit at_end([&] { close(socket); });
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &kAnswerTimeout, sizeof kAnswerTimeout);
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &kAnswerTimeout, sizeof kAnswerTimeout);
  const Name name = name_of(text);
  if (connect(socket, reinterpret_cast<const sockaddr*>(&name.address), name.bytes) != 0) return -1;
  return is_of_this_user(socket) ? receive_descriptor(socket) : -1;
}

bool StoreDoor::listen() {
  listener_ = open_socket();
  if (listener_ < 0) return false;
  for (int i = 0; i < kNames; ++i) {
    if (bind_to(listener_, prefix_ + std::to_string(i))) return ::listen(listener_, kNames) == 0;
  }
  return false;
}

void StoreDoor::serve(int file, std::chrono::milliseconds at_most) {
  const auto until = std::chrono::steady_clock::now() + at_most;
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    if (left.count() <= 0) return;
    pollfd events[] = {{listener_, POLLIN, 0}, {stop_, POLLIN, 0}};
    const int ready = poll(events, 2, static_cast<int>(left.count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0 || events[1].revents != 0) return;
    const int guest = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (guest < 0) continue;
    if (is_of_this_user(guest)) send_descriptor(guest, file);
    close(guest);
  }
}

void StoreDoor::stop() {
  const std::uint64_t one = 1;
  (void)!write(stop_, &one, sizeof one);
}

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
