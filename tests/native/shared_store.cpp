// A shared store between processes: found, shared, waited for, bounded, and what is left of those that are killed at
// any step. Each other process is a forked child of this one, and takes part by itself.

#include "backup/shared_store.hpp"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "driver/host.hpp"
#include "support/error.hpp"

using namespace memsaver;

namespace {

constexpr std::size_t kLimit = 64 * kSlabBytes;
const std::string kName = "native-" + std::to_string(getpid());

// Content number `seed` of so many bytes, and its digest under the store's key.
std::vector<unsigned char> content(unsigned seed, std::size_t bytes) {
  std::vector<unsigned char> data(bytes);
  for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<unsigned char>(seed * 31 + i / 7 + 1);
  return data;
}
Digest digest_of(const DigestKey& key, const std::vector<unsigned char>& data) {
  return digest_on_host(key, {reinterpret_cast<std::uintptr_t>(data.data()), data.size(), 0});
}
bool equal(const std::vector<HostRange>& ranges, const std::vector<unsigned char>& data) {
  std::size_t at = 0;
  for (const auto& range : ranges) {
    const std::size_t bytes = std::min(range.bytes, data.size() - at);
    if (std::memcmp(reinterpret_cast<void*>(range.address), data.data() + at, bytes) != 0) return false;
    at += bytes;
  }
  return at == data.size();
}

// A process's part in a store.
struct Part {
  std::unique_ptr<Driver> driver = open_host_driver({}, std::size_t{1} << 20);
  SharedStore store;
  explicit Part(const std::string& name = kName, std::size_t limit = kLimit) : store(*driver, name, limit) {}

  // Keeps content, written by this process or found. Returns the entry.
  std::uint32_t keep(unsigned seed, std::size_t bytes, bool* wrote = nullptr, bool alone = false) {
    const auto data = content(seed, bytes);
    auto answer = store.want(digest_of(store.key(), data), bytes, alone);
    for (; answer.found == SharedStore::Found::awaited; answer = store.want(digest_of(store.key(), data), bytes)) {
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
    store.settle();
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
    CHECK(waitpid(pid_, nullptr, WUNTRACED) == pid_);
  }
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

char wait_for_word(int end) {
  char byte = 0;
  return read(end, &byte, 1) == 1 ? byte : '\0';
}
void answer(int end, char byte) { CHECK(write(end, &byte, 1) == 1); }

// Keeps contents 0 to `count`, and says so. Then, at each word, looks for content 1 again and says if it is there.
Child keeper(unsigned count, std::size_t bytes = kBlockBytes) {
  return Child([=](int end) {
    Part part;
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

void wait_until(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    CHECK(std::chrono::steady_clock::now() < until);
    std::this_thread::yield();
  }
}

void one_copy_for_three_processes() {
  std::vector<Child> children;
  for (int i = 0; i < 2; ++i) {
    children.push_back(keeper(6));
    CHECK(children.back().hear() == 'k');
  }
  Part part;
  for (unsigned seed = 0; seed < 6; ++seed) {
    bool wrote = true;
    part.keep(seed, kBlockBytes, &wrote);
    CHECK(!wrote);
  }
  const SharedStoreStatus status = part.store.status();
  CHECK(status.processes == 3 && status.held_bytes == 6 * kBlockBytes && status.used_bytes == 6 * kBlockBytes);
  CHECK(status.share_bytes == 6 * (kBlockBytes / 3));
  // Writers die; what they wrote stays for those that use it.
  for (auto& child : children) child.kill_now();
  wait_until([&] { return part.store.status().processes == 1; });
  CHECK(part.store.status().share_bytes == 6 * kBlockBytes);
  bool wrote = true;
  const std::uint32_t again = part.keep(3, kBlockBytes, &wrote);
  CHECK(!wrote);
  part.drop(again);
  for (unsigned seed = 0; seed < 6; ++seed) {
    const std::uint32_t entry = part.keep(seed, kBlockBytes);
    part.drop(entry);
    part.drop(entry);
  }
  CHECK(part.store.status().used_bytes == 0 && part.store.status().held_bytes == 0);
  part.store.trim();
  CHECK(part.store.status().total_bytes == 0);
}

void memory_is_used_again() {
  Part part;
  std::size_t most = 0;
  for (unsigned round = 0; round < 200; ++round) {
    std::vector<std::uint32_t> entries;
    for (unsigned i = 0; i < 9; ++i) entries.push_back(part.keep(100 + round * 9 + i, (1 + (round + i) % 4) * 4992));
    for (const auto entry : entries) part.drop(entry);
    most = std::max(most, part.store.status().total_bytes);
    CHECK(part.store.status().used_bytes == 0);
  }
  CHECK(most <= 2 * kSlabBytes + 9 * 20480);
}

void claims_are_waited_for() {
  Part part;
  const auto data = content(7, kBlockBytes);
  const Digest digest = digest_of(part.store.key(), data);
  const auto mine = part.store.want(digest, data.size());
  CHECK(mine.found == SharedStore::Found::claimed);
  Child waiter([&](int end) {
    Part other;
    answer(end, other.store.want(digest, kBlockBytes).found == SharedStore::Found::awaited ? 'w' : '?');
    bool wrote = false;
    other.keep(7, kBlockBytes, &wrote);
    answer(end, wrote ? 'c' : 'k');
    (void)wait_for_word(end);
  });
  CHECK(waiter.hear() == 'w');
  part.drop(mine.entry);  // the claim is given up: the waiter takes over
  CHECK(waiter.hear() == 'c');
  bool wrote = true;
  part.keep(7, kBlockBytes, &wrote);
  CHECK(!wrote);
  // One that does not wait writes a copy of its own.
  const auto claimed = part.store.want(digest_of(part.store.key(), content(8, 8192)), 8192);
  CHECK(claimed.found == SharedStore::Found::claimed);
  const auto alone = part.store.want(digest_of(part.store.key(), content(8, 8192)), 8192, true);
  CHECK(alone.found == SharedStore::Found::claimed && alone.entry != claimed.entry);
}

void it_is_bounded_as_a_whole() {
  const std::string name = kName + "-bounded";
  const std::size_t limit = 2 * kSlabBytes;
  Child first([&](int end) {
    Part part(name, limit);
    for (unsigned seed = 0; seed < 3; ++seed) part.keep(seed, kBlockBytes);
    answer(end, 'k');
    (void)wait_for_word(end);
  });
  CHECK(first.hear() == 'k');
  Part part(name, std::size_t{1} << 40);  // the first one's limit holds
  CHECK(part.store.status().limit_bytes == limit);
  std::vector<std::uint32_t> entries;
  const auto fill = [&] {
    for (unsigned seed = 50;; ++seed) entries.push_back(part.keep(seed, kBlockBytes));
  };
  CHECK_THROWS(fill(), ErrorKind::out_of_host_memory);
  CHECK(part.store.status().total_bytes <= limit);
  CHECK(part.store.status().used_bytes == limit);
}

void others_share_nothing() {
  Part part;
  Part other(kName + "-other");
  CHECK(std::memcmp(&part.store.key(), &other.store.key(), sizeof(DigestKey)) != 0);
  part.keep(1, kBlockBytes);
  CHECK(other.store.status().processes == 1 && other.store.status().used_bytes == 0);
  CHECK_THROWS(Part("a/b"), ErrorKind::configuration);
  CHECK_THROWS(Part(""), ErrorKind::configuration);
  if (getuid() != 0) return;
  // Another user with the same name, and one that wants the first one's file.
  Child stranger([&](int end) {
    CHECK(setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
    {
      Part own;
      answer(end, own.store.status().processes == 1 && own.store.status().used_bytes == 0 ? 'o' : '?');
    }
    (void)wait_for_word(end);
  });
  CHECK(stranger.hear() == 'o');
}

void forked_children_take_no_part() {
  auto part = std::make_unique<Part>();
  part->keep(1, kBlockBytes);
  Child child([](int end) {
    answer(end, 'f');
    (void)wait_for_word(end);
  });
  CHECK(child.hear() == 'f');
  part.reset();
  Part again;  // the child keeps neither the name nor the memory
  CHECK(again.store.status().processes == 1 && again.store.status().used_bytes == 0);
}

void a_stopped_process_hinders_nobody_for_long() {
  Child stopped = keeper(1);
  CHECK(stopped.hear() == 'k');
  Part part;
  stopped.stop();
  part.keep(0, kBlockBytes);
  part.keep(1, kBlockBytes);
  {
    Part newcomer;  // another one lets it in
    CHECK(newcomer.store.status().processes == 3);
  }
  stopped.go_on();
}

// The steps of a process's life in the store, and at which of them it is to be killed.
std::atomic<int> steps{0};
int fatal_step = 0;
void on_step(const char*) {
  if (++steps == fatal_step) kill(getpid(), SIGKILL);
}

// All that a process does, with slabs and entries of its own and of others.
void live() {
  Part part;
  std::vector<std::uint32_t> entries;
  for (unsigned seed = 0; seed < 4; ++seed) entries.push_back(part.keep(seed, kBlockBytes));
  for (unsigned seed = 20; seed < 24; ++seed) entries.push_back(part.keep(seed, kBlockBytes * 3 / 4));
  part.store.prepare_beyond(kSlabBytes);
  part.store.wait_until_prepared();
  for (std::size_t i = 0; i < entries.size(); i += 2) part.drop(entries[i]);
  part.store.trim();
}

void killed_at_each_step() {
  Part part;
  const Child third = keeper(2);
  CHECK(third.hear() == 'k');
  std::vector<std::uint32_t> held{part.keep(0, kBlockBytes), part.keep(1, kBlockBytes), part.keep(9, kBlockBytes)};
  int killed = 0;
  for (fatal_step = 1;; ++fatal_step) {
    Child child([&](int) {
      shared_step = on_step;
      live();
    });
    const int status = child.end();
    CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0);
    // The others lose nothing, go on at once, and what the dead one had comes back.
    bool wrote = true;
    part.drop(part.keep(1, kBlockBytes, &wrote));
    CHECK(!wrote);
    third.say();
    CHECK(third.hear() == 'k');
    part.drop(part.keep(21, kBlockBytes * 3 / 4));
    wait_until([&] {
      part.store.trim();  // what the dead one was writing is used again a little later
      return part.store.status().used_bytes == 3 * kBlockBytes;
    });
    const SharedStoreStatus after = part.store.status();
    CHECK(after.processes == 2 && after.total_bytes <= 4 * kSlabBytes);
    if (!WIFSIGNALED(status)) break;
    ++killed;
  }
  for (const std::uint32_t entry : held) part.drop(entry);
  part.store.trim();
  CHECK(part.store.status().used_bytes == 2 * kBlockBytes);
  CHECK(killed > 50);
  std::printf("killed at %d steps\n", killed);
}

// Many processes at once, some of which are killed: each finds what it keeps equal to what it wants.
void many_at_once() {
  std::vector<Child> children;
  for (unsigned id = 0; id < 6; ++id) {
    children.push_back(Child([id](int end) {
      Part part;
      for (unsigned round = 0; round < 60; ++round) {
        if (round == 5) answer(end, 'r');
        std::vector<std::uint32_t> entries;
        for (unsigned i = 0; i < 8; ++i)
          entries.push_back(part.keep(round / 4 * 8 + (i + id) % 8, 3 * kBlockBytes / 4));
        for (const auto entry : entries) part.drop(entry);
        if (round % 16 == id) part.store.trim();
      }
    }));
  }
  for (const auto& child : children) CHECK(child.hear() == 'r');
  children[0].kill_now();
  children[3].kill_now();
  for (const unsigned id : {1u, 2u, 4u, 5u}) CHECK(children[id].end() == 0);
  Part part;
  wait_until([&] {
    part.store.trim();
    return part.store.status().total_bytes == 0;
  });
  CHECK(part.store.status().processes == 1);
}

}  // namespace

int main() {
  one_copy_for_three_processes();
  memory_is_used_again();
  claims_are_waited_for();
  it_is_bounded_as_a_whole();
  others_share_nothing();
  forked_children_take_no_part();
  a_stopped_process_hinders_nobody_for_long();
  killed_at_each_step();
  many_at_once();
  std::printf("shared store: one copy\n");
  return 0;
}
