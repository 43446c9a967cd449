// Every call, every occurrence: each scenario runs once to count its driver, memory, file and thread calls, and then
// once for each of these calls and each of its errors, failing once or from then on, followed by a retry or by the
// opposite operation. After each failure the invariants must hold, the error must name what failed, and at the end
// nothing may remain.
//
// Built with small sizes (see support/sizes.hpp), so that a few pages are several blocks, chunks, windows and slices.

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "companions.hpp"
#include "scenarios.hpp"
#include "support/host_memory.hpp"
#include "support/sizes.hpp"
#include "support/system.hpp"
#include "system_faults.hpp"
#include "world.hpp"

using namespace memsaver;

namespace {

constexpr std::size_t kForGood = std::size_t{1} << 40;

std::size_t threads() {
  struct stat about{};
  return stat("/proc/self/task", &about) == 0 ? about.st_nlink : 0;
}
std::size_t threads_at_rest = 0;  // this one, and those of a sanitizer

// Threads that lend the link of a device.
std::size_t lenders() {
  std::size_t count = 0;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(thread.path() / "comm"), name);
    count += name == "memsaver-link" ? 1 : 0;
  }
  return count;
}

// What the saver pins and unpins beside its calls, it does in threads that end, except for a shared store: its member,
// and a lender while the device is idle.
void wait_for_background(const World::Options& options) {
  if (options.settings.shared_backups.empty()) {
    while (threads() > threads_at_rest) std::this_thread::yield();
  } else {
    while (threads() > threads_at_rest + 1 && threads() > threads_at_rest + 1 + lenders()) std::this_thread::yield();
  }
}

// What one look at the memory that is available opens, control group by control group.
std::size_t files_of_one_look() {
  const std::size_t before = system_faults().counts["fopen"];
  (void)available_memory_bytes();
  return system_faults().counts["fopen"] - before;
}

struct Fault {
  std::string call;
  bool of_system = false;
  ErrorKind kind = ErrorKind::driver;
  int code = 0;
  bool once_only = false;
};

// The errors that each call can return.
std::vector<Fault> faults_of(const std::string& call, bool of_system) {
  if (!of_system) {
    std::vector<Fault> faults{{call, false, ErrorKind::driver}};
    // A look at what was loaded reaches no device, and so cannot meet a context that is lost.
    if (call != "has_packing") faults.push_back({call, false, ErrorKind::context_lost, 0, true});
    static const std::set<std::string> taking{"create",       "create_exportable", "import_handle", "map",
                                              "allow_access", "create_stream",     "record",        "set_stack_limit"};
    if (taking.count(call) != 0) faults.push_back({call, false, ErrorKind::out_of_device_memory});
    if (call == "register_host") faults.push_back({call, false, ErrorKind::out_of_host_memory});
    return faults;
  }
  const auto with = [&](std::vector<int> codes) {
    std::vector<Fault> faults;
    for (const int code : codes) faults.push_back({call, true, ErrorKind::driver, code, code == EINTR});
    return faults;
  };
  if (call == "mmap") return with({ENOMEM, EAGAIN});
  if (call == "madvise") return with({ENOMEM, EFAULT});
  if (call == "pwrite") return with({ENOSPC, EDQUOT, EFBIG, EIO, EINTR, sys::kShort});
  if (call == "pread") return with({EIO, EINTR, sys::kShort});
  if (call == "fstatvfs") return with({EIO, EINTR});
  if (call == "open") return with({EMFILE, ENFILE, ENOSPC, EACCES, EROFS, EOPNOTSUPP});
  if (call == "mkostemp") return with({EMFILE, ENFILE, EACCES, EROFS});
  if (call == "fopen") return with({EMFILE, ENFILE, ENOMEM});
  if (call == "fallocate") return with({EOPNOTSUPP, EIO});
  return with({EAGAIN});  // thread
}

std::string name_of(const Fault& fault) {
  if (fault.of_system) return fault.code == sys::kShort ? "short" : strerrorname_np(fault.code);
  switch (fault.kind) {
    case ErrorKind::driver:
      return "invalid value";
    case ErrorKind::context_lost:
      return "context lost";
    default:
      return "out of memory";
  }
}

std::string current;  // the case at work

void on_signal(int signal_number) {
  const char text[] = "a case does not end: ";
  if (signal_number != SIGALRM) (void)!write(STDOUT_FILENO, "crashed, and so ", 16);
  (void)!write(STDOUT_FILENO, text, sizeof text - 1);
  (void)!write(STDOUT_FILENO, current.data(), current.size());
  (void)!write(STDOUT_FILENO, "\n", 1);
  _exit(1);
}

struct Totals {
  std::size_t cases = 0;
  std::size_t errors = 0;    // that reached the caller
  std::size_t absorbed = 0;  // without one
  std::size_t calls = 0;     // distinct (scenario, call, occurrence)
  std::size_t undos = 0;     // cases in which the undo failed too
  std::map<std::string, std::size_t> by_call;
  std::map<std::string, std::size_t> by_error;
  std::vector<std::string> problems;
};

void check_error(const Error& error, const Fault& fault, World& world) {
  const std::string text = error.what();
  const auto missing = [&](const char* what) {
    world.problems.push_back(std::string("the error does not name ") + what + ": " + text);
  };
  const bool lost = error.kind == ErrorKind::context_lost;
  // Separate threads pin and unpin memory, and a stream that stays is no failure.
  const bool several_threads = world.ledger->device_count() > 1 || world.saver->status().file_bytes > 0 ||
                               fault.call == "register_host" || fault.call == "unregister_host" ||
                               fault.call == "destroy_stream";
  if (lost && error.call.empty()) return;  // refused, because an earlier call lost the context
  // After a lost context every call of every thread reports it, and any thread's error may be returned.
  const std::string& call = lost && several_threads ? error.call : fault.call;
  if (text.find(call) == std::string::npos && error.kind != ErrorKind::configuration &&
      !(fault.call == "mkostemp" && text.find("open") != std::string::npos)) {
    missing("the call");
  }
  if (fault.call == "trim_graph_memory") return;  // the driver's cache belongs to no tag
  std::stringstream names(error.tag);
  std::set<std::string> named;
  for (std::string name; std::getline(names >> std::ws, name, ',');) named.insert(name);
  for (const auto& name : named) {
    if (world.concerned().count(name) == 0) missing("a tag that it concerns");
  }
  if (named.empty() && !world.concerned().empty()) missing("the tag");
  if (error.bytes == 0) missing("the bytes");
  if (!fault.of_system && error.kind != fault.kind) world.problems.push_back("another kind of error: " + text);
  if (fault.of_system && (fault.code == ENOSPC || fault.code == EDQUOT) && error.kind != ErrorKind::disk_full) {
    world.problems.push_back("a full disk is another kind of error: " + text);
  }
}

// The first call that meets a lost context is recorded.
void check_loss_is_noted(const Fault& fault, World& world) {
  const SaverStatus status = world.saver->status();
  if (status.failure.empty()) {
    world.problems.push_back("a call met a lost context, and it was not noted");
  } else if (status.failure.find(fault.call + " failed") == std::string::npos) {
    world.problems.push_back("what is noted of a lost context does not name the call that met it: " + status.failure);
  }
}

// Every call must report the lost context from now on.
void check_nothing_works(World& world) {
  const std::map<std::string, std::function<void()>> calls{
      {"release", [&] { world.saver->release({}, {}, {}); }},
      {"resume", [&] { world.saver->resume({}); }},
      {"synchronize", [&] { world.saver->synchronize(); }},
      {"allocate", [&] { (void)world.saver->allocate({0, "t", Restore::zero}, 1); }}};
  for (const auto& [name, call] : calls) {
    try {
      call();
      world.problems.push_back(name + " went well after the context was lost");
    } catch (const Error& error) {
      if (error.kind != ErrorKind::context_lost) world.problems.push_back(name + " said: " + error.what());
    }
  }
  if (world.saver->status().state != "failed") world.problems.push_back("the state is not failed");
}

// Runs one case. Returns whether the fault happened.
bool run_case(const Scenario& scenario, const Fault& fault, std::size_t nth, bool for_good, bool opposite,
              const char* undo_fails, Totals& totals) {
  current = scenario.name + " / " + fault.call + " no. " + std::to_string(nth) + ", " + name_of(fault) +
            (for_good ? ", for good" : "") + (opposite ? ", then the opposite" : ", then again") +
            (undo_fails != nullptr ? std::string(", undo's ") + undo_fails + " fails" : "");
  alarm(60);
  World world(scenario.options);
  bool lost = false;
  bool met = false;
  try {
    scenario.prepare(world);
    wait_for_background(scenario.options);
    const std::size_t times = for_good ? kForGood : 1;
    if (fault.of_system) {
      system_faults().plan(fault.call, nth, fault.code, times);
    } else {
      world.faulty->fail(fault.call, nth, fault.kind, times);
    }
    world.fails_for_good = for_good;
    if (undo_fails != nullptr) {
      world.faulty->fail(undo_fails, 1, ErrorKind::driver, kForGood);
      world.undo_may_fail = true;
      world.streams_may_stay = undo_fails == std::string("destroy_stream");
    }
    bool threw = false;
    try {
      scenario.act(world);
    } catch (const Error& error) {
      threw = true;
      if (undo_fails == nullptr || undo_fails == std::string("destroy_stream")) check_error(error, fault, world);
    }
    wait_for_background(scenario.options);
    met = fault.of_system ? system_faults().met() : world.faulty->failures() > 0;
    lost = fault.kind == ErrorKind::context_lost && met;
    if (lost) {
      check_loss_is_noted(fault, world);
      world.ledger->lose_work();
      world.ledger->let_go();
    }
    world.faulty->heal();
    system_faults().heal();
    if (met) {
      ++totals.cases;
      ++totals.by_call[fault.call];
      ++totals.by_error[name_of(fault)];
      ++(threw ? totals.errors : totals.absorbed);
      if (undo_fails != nullptr) ++totals.undos;
    }
    if (lost) {
      if (!world.saver->status().failure.empty()) check_nothing_works(world);
      world.end(true);
    } else if (met) {
      world.check();
      world.undo_may_fail = false;
      if (opposite) {
        scenario.opposite(world);
      } else {
        scenario.act(world);
      }
      world.check();
      world.resume();
      world.check();
      world.release();
      world.resume();
      world.check();
      world.end(false);
    }
  } catch (const std::exception& error) {
    world.problems.push_back(std::string("after the failure: ") + error.what());
  }
  system_faults().heal();
  for (const auto& problem : world.problems) totals.problems.push_back(current + ": " + problem);
  return met;
}

// Calls that the scenario makes, by name.
std::map<std::string, std::size_t> count_calls(const Scenario& scenario, bool of_system, Totals& totals) {
  current = scenario.name + " / without failures";
  alarm(60);
  World world(scenario.options);
  std::map<std::string, std::size_t> calls;
  try {
    scenario.prepare(world);
    wait_for_background(scenario.options);
    const auto counts = [&] {
      const std::lock_guard<std::mutex> lock(system_faults().mutex);
      return of_system ? system_faults().counts : world.faulty->counts();
    };
    auto before = counts();
    scenario.act(world);
    wait_for_background(scenario.options);
    world.check();
    for (const auto& [call, count] : counts()) {
      if (count > before[call]) calls[call] = count - before[call];
    }
    world.end(false);
  } catch (const std::exception& error) {
    world.problems.push_back(error.what());
  }
  for (const auto& problem : world.problems) totals.problems.push_back(current + ": " + problem);
  return calls;
}

// Destroys a saver while one call fails: at most the object of this call, and what it contains, may remain.
void run_ends(const std::string& name, const World::Options& options, const std::function<void(World&)>& prepare,
              Totals& totals) {
  const std::map<std::string, std::pair<std::string, std::set<std::string>>> calls{
      {"unmap", {"mappings", {"mappings", "handles", "reservations"}}},
      {"release", {"handles", {"handles"}}},
      {"unreserve", {"reservations", {"reservations"}}},
      {"unregister_host", {"registered ranges", {"registered ranges"}}},
      {"destroy_stream", {"streams", {"streams"}}}};
  for (const auto& [call, concerned] : calls) {
    const auto& [kind, may_be_left] = concerned;
    for (std::size_t nth = 1, occurrences = 1; nth <= occurrences; ++nth) {
      for (const ErrorKind error : {ErrorKind::driver, ErrorKind::context_lost}) {
        const Fault fault{call, false, error};
        current = name + " / " + call + " no. " + std::to_string(nth) + ", " + name_of(fault);
        alarm(60);
        World world(options);
        try {
          prepare(world);
          wait_for_background(options);
          const auto held = world.ledger->held();
          const auto found = held.find(kind);
          occurrences = found == held.end() ? 0 : found->second;
          world.faulty->fail(call, nth, error, 1);
          for (const auto& [what, count] : world.take_down()) {
            if (error == ErrorKind::context_lost || (count == 1 && may_be_left.count(what) != 0)) continue;
            world.problems.push_back("left behind: " + std::to_string(count) + " " + what);
          }
        } catch (const std::exception& problem) {
          world.problems.push_back(problem.what());
        }
        for (const auto& problem : world.problems) totals.problems.push_back(current + ": " + problem);
        ++totals.cases;
        ++totals.absorbed;
        ++totals.by_call[call];
        ++totals.by_error[name_of(fault)];
      }
      ++totals.calls;
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  std::string only;        // scenarios whose name holds this
  std::size_t stride = 1;  // one case in so many
  bool verbose = false;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument == "--verbose") {
      verbose = true;
    } else if (argument == "--stride" && i + 1 < count) {
      stride = static_cast<std::size_t>(std::atoi(arguments[++i]));
    } else if (argument == "--only" && i + 1 < count) {
      only = arguments[++i];
    } else {
      std::printf("usage: every_call [--only TEXT] [--stride N] [--verbose]\n");
      return 2;
    }
  }
  for (const int number : {SIGALRM, SIGSEGV, SIGABRT, SIGBUS}) signal(number, on_signal);
  // The core warns of every failure that it absorbs.
  const int silent = open("/dev/null", O_WRONLY);
  if (!verbose) dup2(silent, STDERR_FILENO);
  sys::hook = on_system_call;
  const auto start = std::chrono::steady_clock::now();
  Totals totals;
  std::size_t number = 0;
  std::size_t planned = 0;
  char folder[] = "/dev/shm/every-call-XXXXXX";
  World::file_folder = mkdtemp(folder);
  World::other_folder = World::file_folder + "/other";
  mkdir(World::other_folder.c_str(), 0700);
  Companions companions(2);
  std::thread([] {}).join();  // a sanitizer may have brought its own up meanwhile
  threads_at_rest = threads();
  const std::size_t one_look = files_of_one_look();
  for (const auto& scenario : scenarios()) {
    if (scenario.name.find(only) == std::string::npos) continue;
    ++number;
    system_faults().without_unnamed_files = scenario.without_unnamed_files;
    for (const bool of_system : {false, true}) {
      for (const auto& [call, occurrences] : count_calls(scenario, of_system, totals)) {
        for (std::size_t nth = 1; nth <= occurrences; ++nth) {
          // Each look at the memory that is available meets one of its files, another each time.
          if (call == "fopen" && (nth - 1) % one_look != (nth - 1) / one_look % one_look) continue;
          bool reached = false;
          for (const auto& fault : faults_of(call, of_system)) {
            for (const bool for_good : {false, true}) {
              if (for_good && fault.once_only) continue;
              for (const bool opposite : {false, true}) {
                if (planned++ % stride != 0) continue;
                if (opposite && (!scenario.opposite || fault.kind == ErrorKind::context_lost)) continue;
                reached |= run_case(scenario, fault, nth, for_good, opposite, nullptr, totals);
              }
            }
            if (fault.kind != ErrorKind::driver || of_system) continue;
            for (const char* undo : {"unmap", "release", "synchronize", "destroy_stream"}) {
              if (undo == std::string("destroy_stream") && call != "create_stream") continue;
              if (planned++ % stride != 0) continue;
              if (call != undo) run_case(scenario, fault, nth, false, nth % 2 == 0 && scenario.opposite, undo, totals);
            }
          }
          if (reached) ++totals.calls;
        }
      }
    }
  }
  const std::map<std::string, std::function<void(World&)>> ends{{"end, resident",
                                                                 [](World& world) {
                                                                   for (const int device : {0, 1})
                                                                     world.allocate("t", Restore::host, 20, device);
                                                                   world.allocate("f", Restore::file, 6);
                                                                   world.allocate("z", Restore::zero, 2);
                                                                   world.release();
                                                                   world.resume();
                                                                 }},
                                                                {"end, released in part", [](World& world) {
                                                                   for (const int device : {0, 1})
                                                                     world.allocate("t", Restore::host, 20, device);
                                                                   world.allocate("z", Restore::zero, 2);
                                                                   world.release();
                                                                   world.resume({"z"});
                                                                 }}};
  for (const auto& [name, prepare] : ends) {
    if (name.find(only) == std::string::npos) continue;
    ++number;
    World::Options two_devices;
    two_devices.devices = 2;
    run_ends(name, two_devices, prepare, totals);
  }
  alarm(0);
  sys::hook = nullptr;
  if (!companions.end()) totals.problems.push_back("another process of the shared store lost content, or has too much");
  if (rmdir(World::other_folder.c_str()) != 0 || rmdir(folder) != 0)
    totals.problems.push_back(std::string("files are left in ") + folder);
  std::map<std::string, std::size_t> shown;  // of each scenario the first few
  for (const auto& problem : totals.problems) {
    if (++shown[problem.substr(0, problem.find(" / "))] <= 5 || verbose) std::printf("%s\n", problem.c_str());
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  std::printf(
      "{\"scenarios\": %zu, \"calls_failed\": %zu, \"cases\": %zu, \"errors\": %zu, \"absorbed\": %zu, "
      "\"undo_failed_too\": %zu, \"problems\": %zu, \"seconds\": %.1f",
      number, totals.calls, totals.cases, totals.errors, totals.absorbed, totals.undos, totals.problems.size(),
      seconds);
  for (const auto& [name, counts] : {std::pair("by_call", &totals.by_call), std::pair("by_error", &totals.by_error)}) {
    std::printf(", \"%s\": {", name);
    const char* comma = "";
    for (const auto& [key, cases] : *counts) {
      std::printf("%s\"%s\": %zu", comma, key.c_str(), cases);
      comma = ", ";
    }
    std::printf("}");
  }
  std::printf("}\n");
  return totals.problems.empty() && totals.cases > 0 ? 0 : 1;
}
