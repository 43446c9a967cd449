// For the sanitizers: threads allocate, free and read backups while others release and resume.

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "audit.hpp"
#include "check.hpp"
#include "driver/driver.hpp"
#include "support/range_set.hpp"
#include "vmm/saver.hpp"

using namespace memsaver;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kCapacity = std::size_t{256} << 20;
const std::size_t kKeptBytes = 20 * kBlockBytes;

void ranges_merge_and_split() {
  RangeSet set;
  set.add(100, 50);
  set.add(200, 50);
  set.add(150, 50);
  CHECK(set.ranges().size() == 1 && set.total_bytes() == 150);
  set.remove(120, 20);
  CHECK(set.ranges().size() == 2 && set.total_bytes() == 130);
  CHECK(!set.contains(110, 20) && set.contains(140, 110));
  CHECK(*set.take(20) == 100);  // the smallest range that holds them
  CHECK(!set.take(111));
  const auto part = set.take_from_largest(1000);
  CHECK(part && part->begin == 140 && part->bytes == 110 && set.total_bytes() == 0);
  CHECK(!set.take_from_largest(1));
}

void threads_do_not_disturb_each_other() {
  Saver saver(open_host_driver({}, kCapacity), Settings{});
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int id = 0; id < 3; ++id) {
    threads.emplace_back([&, id] {
      std::mt19937 random(static_cast<unsigned>(id));
      std::vector<Address> mine;
      const std::string tag = id == 0 ? "weights" : "scratch";
      while (!stop) {
        if (mine.size() < 16) {
          mine.push_back(
              saver.allocate({0, tag, id == 0 ? Restore::host : Restore::zero}, (1 + random() % 64) * kPage));
        } else {
          const std::size_t victim = random() % mine.size();
          saver.free(mine[victim]);
          mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(victim));
        }
      }
      for (const Address address : mine) saver.free(address);
    });
  }
  threads.emplace_back([&] {
    while (!stop) {
      const SaverStatus status = saver.status();
      CHECK(status.failure.empty());
      std::this_thread::yield();
    }
  });
  const Address kept = saver.allocate({0, "kept", Restore::host}, kKeptBytes);
  std::memset(reinterpret_cast<void*>(kept), 7, kKeptBytes);
  for (int cycle = 0; cycle < 40; ++cycle) {
    saver.release({}, {}, {});
    saver.resume({});
    auto* const data = reinterpret_cast<unsigned char*>(kept);
    CHECK(data[0] == 7 + cycle && data[kKeptBytes - 1] == 7 + cycle);
    std::memset(data, 8 + cycle, kKeptBytes);
    if (cycle == 20) saver.prepare_backup();
  }
  stop = true;
  for (auto& thread : threads) thread.join();
  CHECK(audit(saver).empty());
  saver.free(kept);
  const MemoryInfo memory = saver.driver().memory_info(0);
  CHECK(memory.free_bytes == memory.total_bytes);
}

// Operations, readers and the retention thread use the same backups, one at a time.
void backups_have_one_user_at_a_time() {
  Settings settings;
  settings.retention = Retention::free;
  Saver saver(open_host_driver({}, kCapacity), settings);
  const Address kept = saver.allocate({0, "kept", Restore::host}, kKeptBytes);
  std::memset(reinterpret_cast<void*>(kept), 7, kKeptBytes);
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    std::vector<unsigned char> copy(kKeptBytes);
    while (!stop) {
      const BackupView view = saver.backup_of(kept, copy.size(), copy.data());
      if (view.released) CHECK(view.kept == Kept::host && copy.front() == 7 && copy.back() == 7);
      saver.drop_backups({});
      std::this_thread::yield();
    }
  });
  for (int cycle = 0; cycle < 40; ++cycle) {
    saver.release({}, {}, {});
    saver.resume({});
    CHECK(*reinterpret_cast<unsigned char*>(kept) == 7);
  }
  stop = true;
  reader.join();
  saver.free(kept);
  CHECK(audit(saver).empty());
}

// Two savers of one process, with the same content, release and resume at the same time into one store.
void savers_share_backups() {
  Settings settings;
  settings.shared_backups = "saver-threads-" + std::to_string(getpid());
  const auto replica = [&] {
    Saver saver(open_host_driver({}, kCapacity), settings);
    const Address kept = saver.allocate({0, "kept", Restore::host}, kKeptBytes);
    auto* const data = reinterpret_cast<unsigned char*>(kept);
    for (int cycle = 0; cycle < 40; ++cycle) {
      for (std::size_t at = 0; at < kKeptBytes; at += kPage)
        data[at] = static_cast<unsigned char>(cycle + at / kPage + 1);
      saver.release({}, {}, {});
      if (cycle % 8 == 0) CHECK(saver.status().shared.used_bytes >= kKeptBytes / 2);  // some of it is packed
      saver.resume({});
      for (std::size_t at = 0; at < kKeptBytes; at += kPage) {
        CHECK(data[at] == static_cast<unsigned char>(cycle + at / kPage + 1));
      }
      if (cycle % 5 == 0) saver.drop_backups({});
    }
    CHECK(audit(saver).empty());
    saver.free(kept);
  };
  std::thread other(replica);
  replica();
  other.join();
}

// What fails in the background is a warning: nothing waits for it.
void failures_in_the_background_are_logged() {
  const int log = memfd_create("log", 0);
  const int kept = dup(STDERR_FILENO);
  dup2(log, STDERR_FILENO);
  {
    const auto driver = open_host_driver({}, kCapacity);
    Progress progress;
    BackupSettings settings;
    settings.retention = Retention::free;
    BackupStore store(*driver, settings, progress, [] { throw Error(ErrorKind::driver, "the drop was refused"); });
    const Lock lock(store.operation_mutex);
    store.retain();
  }
  dup2(kept, STDERR_FILENO);
  char text[1000] = {};
  CHECK(pread(log, text, sizeof text - 1, 0) > 0);
  const std::string said = text;
  CHECK(said.find("unused backup memory stays pinned") != std::string::npos);
  CHECK(said.find("the drop was refused") != std::string::npos && said.find('\n') == said.size() - 1);
  close(kept);
  close(log);
}

}  // namespace

int main() {
  ranges_merge_and_split();
  threads_do_not_disturb_each_other();
  backups_have_one_user_at_a_time();
  savers_share_backups();
  failures_in_the_background_are_logged();
  std::printf("threads: no disturbance\n");
  return 0;
}
