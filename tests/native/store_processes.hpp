#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backup/shared_store.hpp"
#include "check.hpp"
#include "driver/driver.hpp"

// Processes of a shared store, for tests: each other process is a forked child of this one, and joins by itself.

namespace memsaver {

inline const std::size_t kLimit = 64 * kSlabBytes;
inline const std::string kName = "native-" + std::to_string(getpid());

// Content number `seed` of so many bytes, and its digest under the store's key.
inline std::vector<unsigned char> content(unsigned seed, std::size_t bytes) {
  std::vector<unsigned char> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(seed * 31 + i / 7 + 1);
  return data;
}
inline Digest digest_of(const DigestKey& key, const std::vector<unsigned char>& data) {
  return digest_on_host(key, {reinterpret_cast<std::uintptr_t>(data.data()), data.size(), 0});
}
inline bool equal(const std::vector<HostRange>& ranges, const std::vector<unsigned char>& data) {
  std::size_t at = 0;
  for (const auto& range : ranges) {
    const std::size_t bytes = std::min(range.bytes, data.size() - at);
    if (std::memcmp(reinterpret_cast<void*>(range.address), data.data() + at, bytes) != 0) return false;
    at += bytes;
  }
  return at == data.size();
}

// A process's membership in a store.
struct Part {
  std::unique_ptr<Driver> driver = open_host_driver({}, std::size_t{1} << 20);
  SharedStore store;
  explicit Part(const std::string& name = kName, std::size_t limit = kLimit) : store(*driver, name, limit) {}

  // Keeps content, written by this process or found. Returns the entry.
  std::uint32_t keep(unsigned seed, std::size_t bytes, bool* wrote = nullptr, bool alone = false) {
    const auto data = content(seed, bytes);
    auto answer = store.find_or_claim(digest_of(store.key(), data), bytes, alone);
    // A process that does not run while it changes the index makes others find no room.
    for (int tries = 0;
         answer.found == SharedStore::Found::awaited || (answer.found == SharedStore::Found::no_room && ++tries < 600);
         answer = store.find_or_claim(digest_of(store.key(), data), bytes)) {
      store.wait_for_change(store.changes());
    }
    if (wrote != nullptr) *wrote = answer.found == SharedStore::Found::claimed;
    if (answer.found == SharedStore::Found::claimed) {
      const auto ranges = store.take(answer.entry, bytes, bytes, -1);
      std::size_t at = 0;
      for (const auto& range : ranges) {
        const std::size_t part = std::min(range.bytes, bytes - at);
        std::memcpy(reinterpret_cast<void*>(range.address), data.data() + at, part);
        at += part;
      }
      store.publish(answer.entry);
    } else {
      CHECK(answer.found == SharedStore::Found::kept);
      CHECK(equal(store.memory_of(answer), data));
    }
    return answer.entry;
  }
  void drop(std::uint32_t entry) {
    store.give(entry);
    store.apply_pending();
  }
};

// Another process, which runs a function with its end of a connection.
class Child {
 public:
  explicit Child(const std::function<void(int)>& life) {
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    pid_ = fork();
    CHECK(pid_ >= 0);
    if (pid_ == 0) {
      close(ends[0]);
      life(ends[1]);
      _exit(0);
    }
    close(ends[1]);
    end_ = ends[0];
  }
  Child(Child&& other) noexcept : pid_(std::exchange(other.pid_, 0)), end_(std::exchange(other.end_, -1)) {}
  ~Child() {
    if (pid_ != 0) kill_now();
    close(end_);
  }
  // The next byte that it wrote; 0 if it ended.
  char hear() const {
    char byte = 0;
    return read(end_, &byte, 1) == 1 ? byte : '\0';
  }
  void say() const { CHECK(write(end_, "?", 1) == 1); }
  void stop() const {
    kill(pid_, SIGSTOP);
    wait_until_stopped();
  }
  void wait_until_stopped() const { CHECK(waitpid(pid_, nullptr, WUNTRACED) == pid_); }
  void go_on() const { kill(pid_, SIGCONT); }
  void kill_now() {
    kill(pid_, SIGKILL);
    CHECK(waitpid(std::exchange(pid_, 0), nullptr, 0) > 0);
  }
  int end() {
    int status = 0;
    CHECK(waitpid(std::exchange(pid_, 0), &status, 0) > 0);
    return status;
  }

 private:
  pid_t pid_;
  int end_;
};

inline char wait_for_word(int end) {
  char byte = 0;
  return read(end, &byte, 1) == 1 ? byte : '\0';
}
inline void answer(int end, char byte) { CHECK(write(end, &byte, 1) == 1); }

// Keeps contents 0 to `count`, and says so. Then, at each word, looks for content 1 again and says if it is there.
inline Child keeper(unsigned count, std::size_t bytes = kBlockBytes, const std::string& name = kName) {
  return Child([=](int end) {
    Part part(name);
    for (unsigned seed = 0; seed < count; ++seed) part.keep(seed, bytes);
    answer(end, 'k');
    while (wait_for_word(end) != '\0') {
      bool wrote = true;
      part.drop(part.keep(1, bytes, &wrote));
      answer(end, wrote ? 'w' : 'k');
    }
    _exit(1);
  });
}

inline void wait_until(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    CHECK(std::chrono::steady_clock::now() < until);
    std::this_thread::yield();
  }
}

}  // namespace memsaver
