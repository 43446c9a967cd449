// A shared store between processes: found, shared, waited for, bounded, and what is left of those that are killed or
// stopped at any step.

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <atomic>
#include <iterator>
#include <random>

#include "backup/store_sockets.hpp"
#include "faults/faulty_driver.hpp"
#include "store_processes.hpp"
#include "support/error.hpp"
#include "support/system.hpp"
#include "vmm/saver.hpp"

using namespace memsaver;

namespace {

using std::chrono::milliseconds;

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

void what_is_damaged_is_written_anew() {
  Part part, other;
  const auto damaged = part.keep(6, kBlockBytes);
  (void)other.keep(6, kBlockBytes);
  other.store.spoil(damaged);
  bool wrote = false;
  const auto anew = other.keep(6, kBlockBytes, &wrote);
  CHECK(wrote && anew != damaged);
  CHECK(part.keep(6, kBlockBytes, &wrote) == anew && !wrote);
}

void claims_are_waited_for() {
  Part part;
  const auto data = content(7, kBlockBytes);
  const Digest digest = digest_of(part.store.key(), data);
  const auto mine = part.store.find_or_claim(digest, data.size());
  CHECK(mine.found == SharedStore::Found::claimed);
  Child waiter([&](int end) {
    Part other;
    answer(end, other.store.find_or_claim(digest, kBlockBytes).found == SharedStore::Found::awaited ? 'w' : '?');
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
  // One that does not wait writes another copy.
  const auto claimed = part.store.find_or_claim(digest_of(part.store.key(), content(8, 8192)), 8192);
  CHECK(claimed.found == SharedStore::Found::claimed);
  const auto alone = part.store.find_or_claim(digest_of(part.store.key(), content(8, 8192)), 8192, true);
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
  // A limit beyond what it can keep is reported as what it can keep.
  CHECK(Part(kName + "-huge", std::size_t{1} << 60).store.status().limit_bytes == kSlabs * kSlabBytes);
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

void forked_children_are_no_members() {
  auto part = std::make_unique<Part>();
  part->keep(1, kBlockBytes);
  Child child([&](int end) {
    part.reset();  // its own children do not look for it
    CHECK(Child([](int) {}).end() == 0);
    answer(end, 'f');
    (void)wait_for_word(end);
  });
  CHECK(child.hear() == 'f');
  part.reset();
  Part again;  // the child keeps neither the name nor the memory
  CHECK(again.store.status().processes == 1 && again.store.status().used_bytes == 0);
}

std::size_t open_files() {
  const std::unique_ptr<DIR, int (*)(DIR*)> files(opendir("/proc/self/fd"), &closedir);
  std::size_t count = 0;
  while (readdir(files.get()) != nullptr) ++count;
  return count;
}

// One that is forked while another thread looks for the store keeps none of its names.
void forked_while_it_is_looked_for() {
  const std::string name = kName + "-forked";
  StoreSockets first(name);
  CHECK(first.lock(milliseconds(0)));
  const auto driver = open_host_driver({}, std::size_t{1} << 20);
  const std::size_t before = open_files();
  std::thread looking([&] { SharedStore store(*driver, name, kLimit); });
  wait_until([&] { return open_files() > before; });  // it waits for the lock
  Child child([&](int end) {
    first.close_all();
    answer(end, 'f');
    (void)wait_for_word(end);
  });
  CHECK(child.hear() == 'f');
  first.unlock();
  looking.join();
  CHECK(first.lock(milliseconds(0)));
  CHECK(first.request(milliseconds(0)) == -1);
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
// The same by name: a signal when the step comes for the nth time.
struct {
  std::string step;
  int nth;
  int signal;
} last{};
void on_named_step(const char* step) {
  if (step == last.step && --last.nth == 0) kill(getpid(), last.signal);
}
void end_at(const std::string& step, int nth, int signal) {
  last = {step, nth, signal};
  shared_step = on_named_step;
}

// All that a process does, with its slabs and entries and those of others.
void live(const std::string& name = kName) {
  Part part(name);
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

// Gives the store a text that names contents 0 to `count`.
void give_text(Part& part, std::uint64_t name, unsigned count) {
  const auto claim = part.store.find_or_claim({name, name, 1}, 0);
  CHECK(claim.found == SharedStore::Found::claimed);
  std::ostringstream text;
  text << "a text " << std::hex << count << '\n';
  for (unsigned seed = 0; seed < count; ++seed) {
    const Digest digest = digest_of(part.store.key(), content(seed, kBlockBytes));
    text << digest.lane0 << ' ' << digest.lane1 << ' ' << kBlockBytes << '\n';
  }
  part.store.publish_text(claim.entry, text.str() + "rest");
}

// A keeper that is killed at any of its steps harms nobody, and the next one holds what is there.
void a_keeper_killed_at_each_step() {
  const std::string name = kName + "-keeper";
  auto part = std::make_unique<Part>(name);
  for (unsigned seed = 0; seed < 3; ++seed) part->keep(seed, kBlockBytes);
  give_text(*part, 1, 3);
  const std::size_t used = part->store.status().used_bytes;
  const auto keep = [&](std::size_t limit) {
    const auto driver = open_host_driver({}, std::size_t{1} << 20);
    auto store = std::make_unique<SharedStore>(*driver, name, 0, SharedStore::Kind::keeper);
    store->keep(limit);
    return store;
  };
  int killed = 0;
  for (fatal_step = 1;; ++fatal_step) {
    Child keeper([&](int) {
      shared_step = on_step;
      keep(kLimit)->keep(0);  // holds all, then drops all
    });
    const int status = keeper.end();
    CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0);
    bool wrote = true;
    part->drop(part->keep(1, kBlockBytes, &wrote));
    CHECK(!wrote);
    wait_until([&] { return part->store.status().processes == 1; });
    CHECK(part->store.status().used_bytes == used && part->store.texts().front().complete);
    if (!WIFSIGNALED(status)) break;
    ++killed;
  }
  CHECK(killed > 10);
  Child last([&](int end) {
    const auto driver = open_host_driver({}, std::size_t{1} << 20);
    SharedStore store(*driver, name, 0, SharedStore::Kind::keeper);
    for (bool said = false; store.status().processes == 2; said = true) {
      store.keep(kLimit);
      if (!said) answer(end, 'k');
    }
    store.keep(kLimit);
    answer(end, 'a');
    (void)wait_for_word(end);
    store.keep(kLimit);
    answer(end, 'd');
    (void)wait_for_word(end);
  });
  CHECK(last.hear() == 'k');
  part.reset();  // nobody else has the store
  CHECK(last.hear() == 'a');
  part = std::make_unique<Part>(name);
  CHECK(part->store.status().used_bytes == used);
  CHECK(part->store.find_or_claim({1, 1, 1}, 0).found == SharedStore::Found::kept);
  bool wrote = true;
  for (unsigned seed = 0; seed < 3; ++seed) part->drop(part->keep(seed, kBlockBytes, &wrote));
  CHECK(!wrote);
  // Dropped: nobody finds it, its name can be claimed anew, and the keeper gives it up.
  CHECK(part->store.mark_text(part->store.texts().front().name, SharedLayout::Entry::dropped));
  CHECK(part->store.texts().empty() && !part->store.mark_text("?", SharedLayout::Entry::pinned));
  CHECK(part->store.find_or_claim({1, 1, 1}, 0).found == SharedStore::Found::claimed);
  last.say();
  CHECK(last.hear() == 'd');
  CHECK(part->store.status().used_bytes < kBlockBytes);
}

// Stopped while it has the index. The others go on without it after a while, and it goes on later.
void stopped_at(const std::string& step, const std::string& name) {
  Part part(name);
  part.keep(0, kBlockBytes);
  Child child([&](int) {
    end_at(step, 1, SIGSTOP);
    live(name);
  });
  child.wait_until_stopped();
  const auto data = content(0, kBlockBytes);
  const auto answer = part.store.find_or_claim(digest_of(part.store.key(), data), data.size());
  CHECK(answer.found == SharedStore::Found::no_room);
  CHECK(part.store.status().held_bytes == kBlockBytes);
  child.go_on();
  CHECK(child.end() == 0);
  wait_until([&] {
    part.store.trim();
    return part.store.status().processes == 1 && part.store.status().used_bytes == kBlockBytes;
  });
}

// One dies in the middle of a change, and the first one to find that dies, too, at this step.
void the_one_that_drops_dead_members_dies(const std::string& step, const std::string& name) {
  Part part(name);
  part.keep(0, kBlockBytes);
  bool died = false;
  for (int attempt = 0; !died && attempt < 20; ++attempt) {  // a thread of this process may find it first
    Child dying([&](int) {
      end_at("take: taken", 2, SIGKILL);
      live(name);
    });
    CHECK(WIFSIGNALED(dying.end()));
    Child finder([&](int) {
      end_at(step, 1, SIGKILL);
      Part its(name);
    });
    died = WIFSIGNALED(finder.end());
    bool wrote = true;
    part.drop(part.keep(0, kBlockBytes, &wrote));
    CHECK(!wrote);
  }
  CHECK(died);
  wait_until([&] {
    part.store.trim();
    return part.store.status().processes == 1 && part.store.status().used_bytes == kBlockBytes;
  });
  part.keep(5, kBlockBytes);
  CHECK(part.store.status().used_bytes == 2 * kBlockBytes && part.store.status().total_bytes <= 2 * kSlabBytes);
}

// A second store of one name would double what its limit allows.
void a_store_whose_processes_are_stopped_is_not_founded_again(const std::string& name) {
  StoreSockets asking(name);
  CHECK(asking.request(milliseconds(0)) == -1);
  Child stopped = keeper(1, kBlockBytes, name);
  CHECK(stopped.hear() == 'k');
  stopped.stop();
  CHECK(!asking.request(milliseconds(10)));
  CHECK_THROWS(Part(name), ErrorKind::configuration);
  stopped.go_on();
  CHECK(Part(name).store.status().processes == 2);
}

int holes_reported_to = -1;
int slow_holes(const char* call, std::size_t) {
  if (call != std::string("fallocate")) return 0;
  if (holes_reported_to >= 0) answer(std::exchange(holes_reported_to, -1), 'h');
  std::this_thread::sleep_for(milliseconds(200));
  return 0;
}

// As after one of two replicas was killed, and starts again.
void a_process_that_gives_memory_back_answers(const std::string& name) {
  Child slow([&](int end) {
    holes_reported_to = end;
    sys::hook = slow_holes;
    Part part(name);
    answer(end, 'r');
    (void)wait_for_word(end);
  });
  CHECK(slow.hear() == 'r');
  Child killed = keeper(60, kBlockBytes, name);
  CHECK(killed.hear() == 'k');
  killed.kill_now();
  CHECK(slow.hear() == 'h');
  CHECK(Part(name).store.status().processes == 2);
}

void a_process_without_descriptors_answers_later(const std::string& name) {
  Child full([&](int end) {
    Part part(name);
    rlimit files{};
    CHECK(getrlimit(RLIMIT_NOFILE, &files) == 0);
    const rlimit none{0, files.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    answer(end, 'f');
    (void)wait_for_word(end);
    CHECK(setrlimit(RLIMIT_NOFILE, &files) == 0);
    (void)wait_for_word(end);
  });
  CHECK(full.hear() == 'f');
  CHECK(!StoreSockets(name).request(milliseconds(50)));
  full.say();
  CHECK(Part(name).store.status().processes == 2);
}

// A socket of another user under a name of the store is ignored, and what connects as another user gets nothing.
void strangers_are_not_asked() {
  if (getuid() != 0) return;
  const std::string name = kName + "-strange";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string text = "memsaver-backups/" + std::to_string(geteuid()) + "/" + name + "/";
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size() + 1);
  const auto socket_at = [&](char number) {
    std::memcpy(address.sun_path + 1, (text + number).data(), text.size() + 1);
    return socket(AF_UNIX, SOCK_STREAM, 0);
  };
  Child stranger([&](int end) {
    CHECK(setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
    const int own = socket_at('0');
    CHECK(bind(own, reinterpret_cast<const sockaddr*>(&address), bytes) == 0 && listen(own, 8) == 0);
    answer(end, 'l');
    (void)wait_for_word(end);
    const int client = socket_at('1');
    CHECK(connect(client, reinterpret_cast<const sockaddr*>(&address), bytes) == 0);
    char byte = 0;
    answer(end, read(client, &byte, 1) == 0 ? 'n' : '?');
  });
  CHECK(stranger.hear() == 'l');
  StoreSockets sockets(name);
  CHECK(sockets.request(milliseconds(0)) == -1);
  Part part(name);
  CHECK(part.store.status().processes == 1);
  stranger.say();
  CHECK(stranger.hear() == 'n');
}

void other_files_are_refused() {
  const std::size_t bytes = SharedLayout::file_bytes();
  const int good = make_store_file(bytes);
  CHECK(good >= 0 && is_store_file(good, bytes));
  CHECK(!is_store_file(good, bytes + kSlabBytes));
  CHECK(fchmod(good, 0644) == 0 && !is_store_file(good, bytes));
  const int may_shrink = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fchmod(may_shrink, 0600) == 0 && ftruncate(may_shrink, static_cast<off_t>(bytes)) == 0);
  CHECK(!is_store_file(may_shrink, bytes));
  const int device = open("/dev/null", O_RDWR | O_CLOEXEC);
  CHECK(!is_store_file(device, 0));
  if (getuid() == 0) {
    const int theirs = make_store_file(bytes);
    CHECK(fchown(theirs, 65534, 65534) == 0 && !is_store_file(theirs, bytes));
    close(theirs);
  }
  for (const int file : {good, may_shrink, device}) close(file);
}

std::string refused_call;
int refuse(const char* call, std::size_t) { return call == refused_call ? ENOMEM : 0; }
void while_refused(const std::string& call, const std::function<void()>& work) {
  refused_call = call;
  sys::hook = refuse;
  work();
  sys::hook = nullptr;
}

// The machine has no memory for a slab: that is an error, and no later write meets a missing page.
void slabs_that_could_not_be_made_are_not_used() {
  Part part(kName + "-short");
  for (const char* const call : {"madvise", "mmap"}) {
    const auto data = content(1, kBlockBytes);
    const auto claim = part.store.find_or_claim(digest_of(part.store.key(), data), data.size());
    CHECK(claim.found == SharedStore::Found::claimed);
    while_refused(call, [&] {
      CHECK_THROWS(part.store.take(claim.entry, data.size(), data.size(), -1), ErrorKind::out_of_host_memory);
    });
    CHECK(part.store.status().total_bytes == 0);
    part.drop(claim.entry);
    part.drop(part.keep(1, kBlockBytes));
    CHECK(part.store.status().total_bytes == kBlockBytes);
    part.store.trim();
  }
}

// A slab that one process failed to map is given back once the others do not need it.
void what_could_not_be_mapped_does_not_stay() {
  const std::string name = kName + "-unmapped";
  Part part(name);
  {
    Part writer(name);
    writer.keep(3, kBlockBytes);
    const auto data = content(3, kBlockBytes);
    const auto found = part.store.find_or_claim(digest_of(part.store.key(), data), data.size());
    CHECK(found.found == SharedStore::Found::kept);
    while_refused("mmap", [&] { CHECK_THROWS(part.store.memory_of(found), ErrorKind::out_of_host_memory); });
    part.drop(found.entry);
  }
  part.store.trim();
  CHECK(part.store.status().total_bytes == 0);
}

// An index that something has overwritten leads to no access outside of what an entry has.
void sizes_in_the_index_are_checked() {
  const std::string name = kName + "-sizes";
  Part part(name);
  StoreSockets sockets(name);
  const int file = sockets.request(milliseconds(5000)).value_or(-1);
  void* const memory = mmap(nullptr, sizeof(SharedLayout), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  CHECK(memory != MAP_FAILED);
  auto& layout = *static_cast<SharedLayout*>(memory);
  const auto changes_are_seen = [&](unsigned seed, const std::function<void(SharedLayout::Entry&)>& change) {
    SharedLayout::Entry& entry = layout.entries[part.keep(seed, kBlockBytes)];
    bool wrote = true;
    part.keep(seed, kBlockBytes, &wrote);
    CHECK(!wrote);
    change(entry);
    part.keep(seed, kBlockBytes, &wrote);
    CHECK(wrote);
  };
  changes_are_seen(1, [](auto& entry) { entry.bytes += kSlabBytes; });
  changes_are_seen(2, [](auto& entry) { entry.bytes -= 1; });
  changes_are_seen(3, [](auto& entry) { entry.packed_bytes = entry.bytes; });
  changes_are_seen(4, [](auto& entry) {
    entry.bytes = kBlockBytes / 2;
    entry.packed_bytes = kBlockBytes / 2 + 1;
  });
  const std::uint32_t lent = part.keep(5, kBlockBytes);
  {
    const Lock lending(part.store.lending);
    CHECK(sum_of(part.store.pinned_memory_of(lent)) == kBlockBytes);
    --layout.entries[lent].piece[0].grains;
    CHECK(part.store.pinned_memory_of(lent).empty());
    ++layout.entries[lent].piece[0].grains;
  }
  CHECK(SharedIndex::is_valid(layout));
  ++layout.sizes[std::size(layout.sizes) - 1];  // of another version of packed content
  CHECK(!SharedIndex::is_valid(layout));
  munmap(memory, sizeof(SharedLayout));
  close(file);
}

// A block that is to be packed is awaited; meanwhile memory for packing is given up for more, which the device refuses.
void no_room_to_pack_what_was_awaited() {
  const std::string name = kName + "-packed";
  Part other(name);
  auto owned = std::make_unique<FaultyDriver>(open_host_driver({}, std::size_t{4} << 20));
  FaultyDriver& driver = *owned;
  Settings settings;
  settings.shared_backups = name;
  settings.host_backup_limit = kLimit;
  Saver saver(std::move(owned), settings);
  constexpr std::size_t kBlocks = 25;
  const Address address = saver.allocate({0, "w", Restore::host}, kBlocks * kBlockBytes);
  std::vector<std::uint16_t> weights(kBlocks * kBlockBytes / 2);
  std::mt19937 numbers(1);
  for (auto& each : weights) each = static_cast<std::uint16_t>((numbers() & 0x81ff) | 0x3c00);
  std::memcpy(reinterpret_cast<void*>(address), weights.data(), kBlocks * kBlockBytes);
  const std::size_t kAwaited = 12 * kBlockBytes;  // the chunks before it leave room for more buffers
  const DigestItem item{address + kAwaited, kBlockBytes, kAwaited / kDigestWord};
  const auto claim = other.store.find_or_claim(digest_on_host(other.store.key(), item), kBlockBytes);
  CHECK(claim.found == SharedStore::Found::claimed);
  driver.fail("create", 2, ErrorKind::out_of_device_memory, 1);
  std::thread gives_up([&] {
    wait_until([&] { return driver.failures() > 0; });
    other.drop(claim.entry);
  });
  saver.release({}, {}, {});
  gives_up.join();
  saver.resume({});
  CHECK(std::memcmp(reinterpret_cast<void*>(address), weights.data(), kBlocks * kBlockBytes) == 0);
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
  // These mostly wait for one another, each in a separate process and store.
  std::vector<Child> others;
  const auto begin = [&](const std::function<void(const std::string&)>& test) {
    others.push_back(Child([&](int) { test(kName + "-" + std::to_string(others.size())); }));
  };
  begin(a_store_whose_processes_are_stopped_is_not_founded_again);
  begin(a_process_that_gives_memory_back_answers);
  begin(a_process_without_descriptors_answers_later);
  for (const char* const step : {"find: claimed", "take: marked", "publish: before", "slab: freeing"}) {
    begin([step](const auto& name) { stopped_at(step, name); });
  }
  for (const char* const step :
       {"repair: cleared", "drop all: hold", "lose: entry", "drop all: slab", "dead: dropped", "join: alive"}) {
    begin([step](const auto& name) { the_one_that_drops_dead_members_dies(step, name); });
  }
  one_copy_for_three_processes();
  memory_is_used_again();
  what_is_damaged_is_written_anew();
  claims_are_waited_for();
  it_is_bounded_as_a_whole();
  others_share_nothing();
  strangers_are_not_asked();
  other_files_are_refused();
  forked_children_are_no_members();
  forked_while_it_is_looked_for();
  a_stopped_process_hinders_nobody_for_long();
  slabs_that_could_not_be_made_are_not_used();
  what_could_not_be_mapped_does_not_stay();
  sizes_in_the_index_are_checked();
  no_room_to_pack_what_was_awaited();
  killed_at_each_step();
  a_keeper_killed_at_each_step();
  many_at_once();
  for (auto& child : others) CHECK(child.end() == 0);
  std::printf("shared store: one copy\n");
  return 0;
}
