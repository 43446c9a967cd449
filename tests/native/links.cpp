// Links of other members' devices: content comes over them, and comes whole if a lender or a borrower ends, stops or
// fails. `links threads`: only what forks no process, for the thread sanitizer. A process forks before it has threads.

#include <cstring>
#include <random>

#include "../reliability/ledger_driver.hpp"
#include "audit.hpp"
#include "faults/faulty_driver.hpp"
#include "store_processes.hpp"
#include "vmm/saver.hpp"

using namespace memsaver;

namespace {

constexpr std::size_t kCapacity = std::size_t{64} << 20;
const std::size_t kContent = 88 * kBlockBytes;  // more than is digested at once

Settings in_store(bool pack) {
  Settings settings;
  settings.shared_backups = kName;
  settings.host_backup_limit = kLimit;
  settings.pack = pack;
  return settings;
}

// A process, or a part of this one, with one device and some memory on it, unlike that of every other one. Its work on
// the device is done as late as possible.
struct Engine {
  std::unique_ptr<LedgerDriver> owned_ledger;
  LedgerDriver& ledger = *owned_ledger;
  std::unique_ptr<FaultyDriver> owned;
  FaultyDriver& faulty = *owned;
  Saver saver;
  std::size_t bytes;
  Address address;
  std::vector<unsigned char> expected;

  // `pack`: the content is like weights, and is packed.
  Engine(const std::string& device, std::size_t content, bool pack = false)
      : owned_ledger(std::make_unique<LedgerDriver>(open_host_driver({device + kName}, kCapacity))),
        owned(std::make_unique<FaultyDriver>(std::move(owned_ledger))),
        saver(std::move(owned), in_store(pack)),
        bytes(content),
        address(saver.allocate({0, "t", Restore::host}, bytes)),
        expected(bytes) {
    std::mt19937 random(static_cast<unsigned>(getpid()) + static_cast<unsigned>(bytes));
    for (std::size_t i = 0; i < bytes; ++i) {
      expected[i] = static_cast<unsigned char>(pack && i % 2 != 0 ? 0x3e + random() % 2 : random());
    }
    std::memcpy(reinterpret_cast<void*>(address), expected.data(), bytes);
  }
  void release() { saver.release({}, {}, {}); }
  // Returns the bytes that came over links of others.
  double resume() {
    const OperationResult result = saver.resume({}, true);
    CHECK(std::memcmp(reinterpret_cast<void*>(address), expected.data(), bytes) == 0);
    CHECK(audit(saver).empty());
    for (const auto& misuse : ledger.misuses()) std::fprintf(stderr, "misuse: %s\n", misuse.c_str());
    CHECK(ledger.misuses().empty());
    return result.work.linked_bytes;
  }
  // Resumes, and releases again, until content has come over links of others.
  void borrow() {
    // Otherwise it may be done before a link is open.
    faulty.delay("copy_to_device", 0.002);
    wait_until([&] {
      const double linked = resume();
      release();
      return linked > 0;
    });
    faulty.heal();
  }
  [[nodiscard]] SharedStore& store() { return *saver.shared_store(); }
  [[nodiscard]] std::size_t used_bytes() {
    const MemoryInfo memory = saver.driver().memory_info(0);
    return memory.total_bytes - memory.free_bytes;
  }
  // Returns how many members say that they do not use their device, another one.
  [[nodiscard]] std::size_t idle_peers() {
    const auto peers = store().index().peers();
    return static_cast<std::size_t>(std::count_if(
        peers.begin(), peers.end(), [this](const auto& peer) { return store().index().is_idle(peer.first); }));
  }
  // Returns whether a member lends its link to this one.
  [[nodiscard]] bool is_lent_to() {
    const auto peers = store().index().peers();
    return std::any_of(peers.begin(), peers.end(), [this](const auto& peer) {
      const int connection = store().sockets().borrow_link(peer.first);
      if (connection >= 0) close(connection);
      return connection >= 0;
    });
  }
};

// A process that lends its link from a word on, and says 'r' then. At the next one it resumes, and says 'a'. `failing`:
// its first call of this name fails; at each word before it says 'n', and 'f' at the first one after it.
Child lender(const std::string& device, const std::string& failing = "") {
  return Child([=](int end) {
    (void)wait_for_word(end);
    Engine engine(device, kBlockBytes);
    engine.release();
    if (!failing.empty()) engine.faulty.fail(failing, 1, ErrorKind::driver, 1);
    answer(end, 'r');
    bool failed = failing.empty();
    while (wait_for_word(end) != '\0') {
      if (failed) {
        engine.resume();
        answer(end, 'a');
      } else {
        failed = engine.faulty.failures() > 0;
        answer(end, failed ? 'f' : 'n');
      }
    }
  });
}
void start(const Child& child) {
  child.say();
  CHECK(child.hear() == 'r');
}

void content_comes_over_two_links() {
  std::vector<Child> lenders;
  for (const char* device : {"one", "two"}) lenders.push_back(lender(device));
  Engine engine("own", kContent);
  engine.release();
  for (const auto& each : lenders) start(each);
  engine.faulty.delay("copy_to_device", 0.002);
  // At first the lenders may not have pinned it.
  wait_until([&] {
    const double linked = engine.resume();
    engine.release();
    return linked > static_cast<double>(kContent / 2);
  });
  for (int cycle = 0; cycle < 3; ++cycle) engine.borrow();
  // A lender that uses its device again lends no more.
  for (const auto& each : lenders) each.say();
  for (const auto& each : lenders) CHECK(each.hear() == 'a');
  CHECK(!engine.is_lent_to());
  CHECK(engine.resume() == 0);
}

void lenders_that_end_or_stop_lose_nothing() {
  std::vector<Child> lenders;
  for (int i = 0; i < 12; ++i) lenders.push_back(lender("one"));
  Engine engine("own", kContent);
  engine.release();
  for (int i = 0; i < 12; ++i) {
    Child child = std::move(lenders.back());
    lenders.pop_back();
    start(child);
    engine.borrow();
    engine.faulty.delay("copy_to_device", 0.001);
    std::thread ender([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(200 * i * i));
      if (i % 3 == 0) child.kill_now();
      if (i % 3 == 1) child.stop();
      if (i % 3 == 2) child.say();
    });
    engine.resume();
    ender.join();
    engine.release();
    if (i % 3 == 1) child.go_on();
  }
}

void a_dead_member_hides_no_other_one_on_its_device() {
  // Until a resume takes place after its end, and before other members see that.
  wait_until([&] {
    Child dead = lender("one");
    Child living = lender("one");
    Engine engine("own", kContent);
    engine.release();
    start(dead);
    start(living);
    CHECK(engine.idle_peers() == 2);
    engine.borrow();
    engine.faulty.delay("copy_to_device", 0.002);
    dead.kill_now();
    const double linked = engine.resume();
    return engine.idle_peers() == 2 && linked > 0;
  });
}

void a_forked_child_offers_no_link() {
  Child child([](int end) {
    (void)wait_for_word(end);
    Engine forking("one", kBlockBytes);
    forking.release();
    wait_until([&] { return forking.store().status().pinned_bytes >= kContent; });
    if (fork() == 0) {
      answer(end, 'r');
      (void)wait_for_word(end);  // until the test ends
      _exit(0);
    }
    pause();
  });
  Engine engine("own", kContent);
  engine.release();
  start(child);
  CHECK(engine.is_lent_to());
  child.kill_now();
  CHECK(!engine.is_lent_to());
}

// The lender is this process.
void borrowers_that_end_or_stop_keep_nothing() {
  std::vector<Child> borrowers;
  for (int i = 0; i < 2; ++i) {
    borrowers.push_back(Child([](int end) {
      (void)wait_for_word(end);
      Engine borrower("own", kContent);
      borrower.release();
      borrower.borrow();
      borrower.faulty.delay("copy_to_device", 0.01);
      answer(end, 'r');
      for (;;) {
        borrower.resume();
        borrower.release();
      }
    }));
  }
  Engine engine("one", kBlockBytes);
  engine.release();
  const std::size_t used = engine.used_bytes();
  for (auto& child : borrowers) {
    start(child);
    wait_until([&] { return engine.used_bytes() > used; });
    child.stop();
    if (&child == &borrowers.front()) {
      engine.resume();
      child.kill_now();
      engine.release();
    } else {
      wait_until([&] { return engine.used_bytes() == used; });  // it was silent for too long
      child.kill_now();
    }
    wait_until([&] { return engine.used_bytes() == used; });
  }
}

void calls_that_fail_lose_nothing() {
  std::vector<Child> lenders;
  for (const char* call :
       {"memory_info", "create_stream", "create_exportable", "export_handle", "copy_to_device", "record", "wait"}) {
    lenders.push_back(lender("one", call));
  }
  const Child last = lender("one");
  Engine engine("own", kContent);
  engine.release();
  for (; !lenders.empty(); lenders.pop_back()) {
    const Child& child = lenders.back();
    start(child);
    engine.faulty.delay("copy_to_device", 0.002);
    wait_until([&] {
      engine.resume();
      engine.release();
      child.say();
      return child.hear() == 'f';
    });
    engine.borrow();  // it lends again
    child.say();
    CHECK(child.hear() == 'a');
  }
  start(last);
  for (const char* call : {"create_stream", "import_handle", "copy_on_device"}) {
    engine.borrow();
    engine.faulty.fail(call, 1, ErrorKind::driver, 1);
    engine.faulty.delay("copy_to_device", 0.002);
    wait_until([&] {
      try {
        engine.resume();
      } catch (const Error& error) {
        CHECK(error.kind == ErrorKind::driver && std::string(call) == "copy_on_device");
        engine.resume();
      }
      engine.release();
      return engine.faulty.failures() == 1;
    });
    engine.faulty.heal();
  }
}

// In this process alone, as two members.
void an_allocation_ends_lending() {
  Engine engine("own", kContent);
  Engine other("one", kBlockBytes);
  other.release();
  CHECK(engine.is_lent_to());
  const Address more = other.saver.allocate({0, "t", Restore::discard}, kBlockBytes);
  CHECK(!engine.is_lent_to());
  other.saver.free(more);
  other.resume();
  other.release();
  CHECK(engine.is_lent_to());
  other.saver.reserve({});
  CHECK(!engine.is_lent_to());
}

// A release that ends while memory is allocated lends nothing.
void an_allocation_under_way_is_no_idle_device() {
  Engine engine("own", kContent);
  Engine other("one", kBlockBytes);
  other.release();
  const auto creates = [&] { return other.faulty.counts()["create"]; };
  const std::size_t before = creates();
  other.faulty.delay("create", 1000);
  Address more = 0;
  std::thread allocating([&] { more = other.saver.allocate({0, "t", Restore::discard}, kBlockBytes); });
  wait_until([&] { return creates() > before; });
  other.release();
  CHECK(engine.idle_peers() == 0);
  other.faulty.heal();
  allocating.join();
  CHECK(engine.idle_peers() == 0 && !engine.is_lent_to());
  other.saver.free(more);
  other.release();
  CHECK(engine.is_lent_to());
}

// At the end only its blocks are left, and they come over the own link.
void a_lender_that_hangs_is_not_waited_for() {
  Engine engine("own", kContent);
  engine.release();
  Engine other("one", kBlockBytes);
  other.release();
  // Until it hangs with blocks that it was asked for, and this process is not held up by others.
  wait_until([&] {
    engine.borrow();
    engine.faulty.delay("copy_to_device", 0.002);
    const auto copies = [&] { return other.faulty.counts()["copy_to_device"]; };
    const std::size_t before = copies();
    other.faulty.delay("wait", 1000);
    const auto start = std::chrono::steady_clock::now();
    engine.resume();
    const bool soon = std::chrono::steady_clock::now() - start < kLinkPatience;
    other.faulty.heal();
    engine.release();
    return soon && copies() > before;
  });
}

void members_that_resume_together_lose_nothing() {
  Engine engine("own", kContent);
  Engine other("one", kContent - kBlockBytes);
  const auto both = [&](const auto& work) {
    std::thread beside([&] { work(other); });
    work(engine);
    beside.join();
  };
  both([](Engine& each) { each.release(); });
  for (int cycle = 0; cycle < 10; ++cycle) {
    both([](Engine& each) {
      each.resume();
      each.release();
    });
  }
}

void packed_content_comes_over_a_link() {
  Engine engine("own", kContent, true);
  engine.saver.prepare_backup();
  engine.release();
  CHECK(engine.store().status().used_bytes < kContent / 8 * 7);
  Engine other("one", kBlockBytes);
  other.release();
  for (int cycle = 0; cycle < 3; ++cycle) engine.borrow();
}

void a_device_in_use_is_not_lent() {
  Engine engine("own", kContent);
  engine.release();
  Engine idle("one", kBlockBytes);
  idle.release();
  engine.borrow();
  Engine active("one", kBlockBytes / 2);
  engine.faulty.delay("copy_to_device", 0.002);
  CHECK(engine.resume() == 0);
  engine.release();
  active.release();
  engine.borrow();
}

void a_device_short_of_memory_is_not_lent() {
  Engine engine("own", kContent);
  engine.release();
  Engine other("one", kBlockBytes);
  other.release();
  engine.borrow();
  const auto driver = open_host_driver({"one" + kName}, kCapacity);
  const std::size_t most = kCapacity / 4 * 3 + kBlockBytes;
  const Handle handle = driver->create(0, most);
  engine.faulty.delay("copy_to_device", 0.002);
  const std::size_t buffers = other.faulty.counts()["create_exportable"];
  CHECK(engine.resume() == 0 && other.faulty.counts()["create_exportable"] == buffers);
  engine.release();
  driver->release(0, handle, most);
  engine.borrow();
}

// Also if its user uses another one first.
void a_second_device_of_a_process_is_not_lent() {
  Engine engine("own", kContent);
  engine.release();
  Engine idle("two", kBlockBytes);
  idle.release();
  engine.borrow();
  Saver saver(open_host_driver({"one" + kName, "two" + kName}, kCapacity), in_store(false));
  for (const int device : {0, 1}) static_cast<void>(saver.allocate({device, "t", Restore::discard}, kBlockBytes));
  engine.faulty.delay("copy_to_device", 0.002);
  CHECK(engine.resume() == 0);
  engine.release();
  saver.release({}, {}, {});
  engine.borrow();
}

// Memory from which copies are under way included: it is unmapped later.
void memory_that_is_lent_can_be_unmapped() {
  Engine engine("own", kContent);
  engine.release();
  Engine other("one", kBlockBytes);
  other.release();
  for (int i = 0; i < 8; ++i) {
    engine.borrow();
    engine.faulty.delay("copy_to_device", 0.002);
    other.faulty.delay("wait", 0.002);  // copies are under way for so long
    std::thread unmapping([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(2 * i));
      other.store().unmap_lent();
    });
    engine.resume();
    unmapping.join();
    other.faulty.heal();
    engine.release();
    other.resume();
    other.release();
  }
}

// Else a new process would wait for an answer of a member that lends.
void a_member_that_lends_does_its_upkeep() {
  Engine engine("own", kContent);
  engine.release();
  Engine other("one", kBlockBytes);
  other.release();
  wait_until([&] { return other.store().status().pinned_bytes >= kContent; });
  const Lock lending(other.store().lending);  // as in a session
  const auto used = [&] { return other.store().status().used_bytes; };
  const std::size_t before = used();
  for (unsigned seed = 0; seed < 3; ++seed) {
    const auto data = content(seed, kBlockBytes);
    const auto claim = other.store().find_or_claim(digest_of(other.store().key(), data), kBlockBytes);
    CHECK(claim.found == SharedStore::Found::claimed);
    CHECK(!other.store().take(claim.entry, kBlockBytes, kBlockBytes, -1).empty() && used() > before);
    other.store().give(claim.entry);
    wait_until([&] { return used() == before; });
  }
}

void without_a_direct_link_nothing_is_pinned_or_asked() {
  Engine engine("own", kContent);
  Engine other("one", kBlockBytes);
  for (Engine* const each : {&engine, &other}) {
    each->ledger.cut_links();
    each->release();
  }
  wait_until([&] { return other.faulty.counts()["links_directly"] > 0; });
  for (int cycle = 0; cycle < 3; ++cycle) {
    CHECK(engine.resume() == 0);
    engine.release();
  }
  CHECK(other.faulty.counts()["create_exportable"] == 0);
  CHECK(other.store().status().pinned_bytes <= 2 * kSlabBytes);
}

void a_device_that_cannot_be_reached_is_not_asked_for_ever() {
  Engine engine("own", kContent);
  engine.release();
  Engine other("one", kBlockBytes);
  other.release();
  engine.borrow();
  engine.faulty.delay("copy_to_device", 0.002);
  engine.faulty.fail("import_handle", 1, ErrorKind::driver, 1000);
  const auto resume = [&] {
    CHECK(engine.resume() == 0);
    engine.release();
    return engine.faulty.failures();
  };
  wait_until([&] { return resume() == 3; });
  const std::size_t buffers = other.faulty.counts()["create_exportable"];
  for (int cycle = 0; cycle < 3; ++cycle) CHECK(resume() == 3);
  CHECK(other.faulty.counts()["create_exportable"] == buffers);
}

void what_is_pinned_to_be_lent_is_given_back() {
  auto engine = std::make_unique<Engine>("own", kContent);
  engine->release();
  Engine other("one", kBlockBytes);
  other.release();
  const auto pinned = [&] { return other.store().status().pinned_bytes; };
  wait_until([&] { return pinned() >= kContent; });
  // For a hibernation: all of it.
  other.saver.stop_lending();
  CHECK(pinned() <= 2 * kSlabBytes && !engine->is_lent_to());
  other.resume();
  other.release();
  wait_until([&] { return pinned() >= kContent; });
  // What nobody holds, also while the device is in use.
  other.resume();
  engine.reset();
  wait_until([&] { return other.store().status().total_bytes <= 2 * kSlabBytes; });
  CHECK(pinned() <= 2 * kSlabBytes);
}

}  // namespace

int main(int count, char** words) {
  if (count == 1) {
    content_comes_over_two_links();
    lenders_that_end_or_stop_lose_nothing();
    a_dead_member_hides_no_other_one_on_its_device();
    a_forked_child_offers_no_link();
    borrowers_that_end_or_stop_keep_nothing();
    calls_that_fail_lose_nothing();
  } else {
    CHECK(std::strcmp(words[1], "threads") == 0);
  }
  an_allocation_ends_lending();
  an_allocation_under_way_is_no_idle_device();
  a_lender_that_hangs_is_not_waited_for();
  members_that_resume_together_lose_nothing();
  packed_content_comes_over_a_link();
  a_device_in_use_is_not_lent();
  a_device_short_of_memory_is_not_lent();
  a_second_device_of_a_process_is_not_lent();
  memory_that_is_lent_can_be_unmapped();
  a_member_that_lends_does_its_upkeep();
  without_a_direct_link_nothing_is_pinned_or_asked();
  a_device_that_cannot_be_reached_is_not_asked_for_ever();
  what_is_pinned_to_be_lent_is_given_back();
  return 0;
}
