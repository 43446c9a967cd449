// Links of other members' devices: content comes over them, and comes whole if their processes end, stop or refuse.

#include <random>

#include "audit.hpp"
#include "faults/faulty_driver.hpp"
#include "store_processes.hpp"
#include "vmm/saver.hpp"

using namespace memsaver;

namespace {

constexpr std::size_t kCapacity = std::size_t{512} << 20;
const std::size_t kContent = 24 * kBlockBytes;

Settings in_store() {
  Settings settings;
  settings.shared_backups = kName;
  settings.host_backup_limit = kLimit;
  settings.pack = false;
  return settings;
}

// A process with one device and some memory on it.
struct Engine {
  std::unique_ptr<FaultyDriver> owned;
  FaultyDriver& faulty = *owned;
  Saver saver{std::move(owned), in_store()};
  Address address;
  explicit Engine(const std::string& device, std::size_t bytes)
      : owned(std::make_unique<FaultyDriver>(open_host_driver({device + kName}, kCapacity))),
        address(saver.allocate({0, "t", Restore::host}, bytes)) {
    std::mt19937 random(static_cast<unsigned>(bytes));
    auto* const words = reinterpret_cast<std::uint32_t*>(address);
    for (std::size_t i = 0; i < bytes / 4; ++i) words[i] = random();
  }
  [[nodiscard]] std::vector<unsigned char> content(std::size_t bytes) const {
    auto* const data = reinterpret_cast<unsigned char*>(address);
    return {data, data + bytes};
  }
};

// Waits until `count` members lend their links to this one, with all of its content ready.
void wait_for_lenders(Engine& engine, std::size_t count) {
  const auto lends = [](const SharedLayout::Link& link, const std::string&) { return link.lends != 0; };
  wait_until([&] { return engine.saver.shared_store()->index().members_with(lends).size() == count; });
}

// `failing`: the next call of this name fails once it lends.
Child lender(const std::string& device, const std::string& failing = "") {
  return Child([=](int end) {
    Engine engine(device, kBlockBytes);
    engine.saver.release({}, {}, {});
    if (!failing.empty()) engine.faulty.fail(failing, 1, ErrorKind::driver, 1);
    answer(end, 'r');
    (void)wait_for_word(end);
    engine.saver.resume({});
    answer(end, 'a');
    (void)wait_for_word(end);
  });
}

double resumed(Engine& engine, const std::vector<unsigned char>& expected) {
  const OperationResult result = engine.saver.resume({});
  CHECK(engine.content(kContent) == expected);
  CHECK(audit(engine.saver).empty());
  return result.work.linked_bytes;
}

void content_comes_over_two_links() {
  std::vector<Child> lenders;
  for (const char* device : {"one", "two"}) lenders.push_back(lender(device));
  for (auto& each : lenders) CHECK(each.hear() == 'r');
  Engine engine("own", kContent);
  engine.faulty.delay("copy_to_device", 0.01);  // or it would be done before the links are open
  const auto expected = engine.content(kContent);
  for (int cycle = 0; cycle < 5; ++cycle) {
    engine.saver.release({}, {}, {});
    wait_for_lenders(engine, 2);
    // At first the lenders may not have pinned it.
    wait_until([&] {
      const double linked = resumed(engine, expected);
      engine.saver.release({}, {}, {});
      return linked > static_cast<double>(kContent / 4);
    });
    (void)resumed(engine, expected);
  }
  // A lender that uses its device again lends no more.
  for (auto& each : lenders) each.say();
  for (auto& each : lenders) CHECK(each.hear() == 'a');
  wait_for_lenders(engine, 0);
  engine.saver.release({}, {}, {});
  CHECK(resumed(engine, expected) == 0);
}

void lenders_that_end_or_stop_lose_nothing() {
  Engine engine("own", kContent);
  const auto expected = engine.content(kContent);
  for (int i = 0; i < 12; ++i) {
    Child child = lender("one");
    CHECK(child.hear() == 'r');
    engine.saver.release({}, {}, {});
    wait_for_lenders(engine, 1);
    std::thread ender([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(200 * i * i));
      if (i % 3 == 0) child.kill_now();
      if (i % 3 == 1) child.stop();
      if (i % 3 == 2) child.say();
    });
    (void)resumed(engine, expected);
    ender.join();
    if (i % 3 == 1) child.go_on();
  }
}

void calls_that_fail_lose_nothing() {
  Engine engine("own", kContent);
  const auto expected = engine.content(kContent);
  for (const char* call : {"create", "export_handle", "copy_to_device", "record"}) {
    Child child = lender("one", call);
    CHECK(child.hear() == 'r');
    engine.saver.release({}, {}, {});
    wait_for_lenders(engine, 1);
    engine.faulty.delay("copy_to_device", 0.01);
    const double linked = resumed(engine, expected);
    if (linked != 0) std::fprintf(stderr, "%s %f %zu\n", call, linked, engine.faulty.failures());
    CHECK(linked == 0);
    engine.faulty.heal();
  }
  Child child = lender("one");
  CHECK(child.hear() == 'r');
  for (const char* call : {"import_handle", "copy_on_device"}) {
    engine.saver.release({}, {}, {});
    wait_for_lenders(engine, 1);
    engine.faulty.delay("copy_to_device", 0.01);
    engine.faulty.fail(call, 1, ErrorKind::driver, 1);
    try {
      CHECK(resumed(engine, expected) == 0);
    } catch (const Error& error) {
      CHECK(error.kind == ErrorKind::driver && std::string(call) == "copy_on_device");
      (void)resumed(engine, expected);
    }
    CHECK(engine.faulty.failures() == 1);
    engine.faulty.heal();
  }
}

}  // namespace

int main() {
  content_comes_over_two_links();
  lenders_that_end_or_stop_lose_nothing();
  calls_that_fail_lose_nothing();
  return 0;
}
