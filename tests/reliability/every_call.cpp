// Every call, every occurrence: each scenario is run once to count its driver, memory, file and thread calls, and then
// once for each of them, each error that it may give, once and for good, followed by the same operation again or by its
// opposite. After each failure the invariants of the design must hold, the error must name what failed, and in the end
// nothing may be left.
//
// Built with small sizes (see support/sizes.hpp), so that a few pages are several blocks, chunks, windows and slices.

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "support/sizes.hpp"
#include "support/system.hpp"
#include "world.hpp"

using namespace memsaver;

namespace {

// Failures of calls to the operating system, planned as FaultyDriver plans those of the driver.
struct SystemFaults {
  std::mutex mutex;
  std::map<std::string, std::size_t> counts;
  std::string call;
  std::size_t nth = 0;
  std::size_t times = 0;
  int code = 0;
  std::size_t failures = 0;
  bool without_unnamed_files = false;  // as on file systems that do not know O_TMPFILE

  [[nodiscard]] bool met() {
    const std::lock_guard<std::mutex> lock(mutex);
    return failures > 0;
  }
  void plan(const std::string& which, std::size_t from_now, int error, std::size_t how_often) {
    const std::lock_guard<std::mutex> lock(mutex);
    call = which;
    nth = counts[which] + from_now;
    code = error;
    times = how_often;
  }
  void heal() {
    const std::lock_guard<std::mutex> lock(mutex);
    call.clear();
    failures = 0;
  }
};
SystemFaults& system_faults() {
  static SystemFaults faults;
  return faults;
}
int on_system_call(const char* call, std::size_t) {
  auto& faults = system_faults();
  const std::lock_guard<std::mutex> lock(faults.mutex);
  const std::size_t count = ++faults.counts[call];
  if (faults.without_unnamed_files && call == std::string("open")) return EOPNOTSUPP;
  if (faults.call != call || count < faults.nth || count - faults.nth >= faults.times) return 0;
  ++faults.failures;
  return faults.code;
}

constexpr std::size_t kForGood = std::size_t{1} << 40;

struct Scenario {
  std::string name;
  World::Options options;
  std::function<void(World&)> prepare;
  std::function<void(World&)> act;
  std::function<void(World&)> opposite;  // what else must work after a failure; may be none
  bool without_unnamed_files = false;
};

Scenario release_of(std::string name, std::function<void(World&)> prepare, World::Options options = {}) {
  return {std::move(name), std::move(options), std::move(prepare), [](World& world) { world.release(); },
          [](World& world) { world.resume(); }};
}
Scenario resume_of(std::string name, std::function<void(World&)> prepare, World::Options options = {}) {
  return {std::move(name), std::move(options),
          [prepare](World& world) {
            prepare(world);
            world.release();
          },
          [](World& world) { world.resume(); }, [](World& world) { world.release(); }};
}

std::vector<Scenario> scenarios() {
  std::vector<Scenario> list;
  const auto nothing = [](World&) {};
  // Small, several blocks and chunks, and several blocks again behind it.
  const auto fill = [](Restore restore) {
    return [restore](World& world) {
      world.allocate("t", restore, 3);
      world.allocate("t", restore, 34);
      world.allocate("u", restore, 5);
    };
  };
  const auto every_policy = [](World& world) {
    world.allocate("a-scratch", Restore::discard, 6);
    world.allocate("cache", Restore::zero, 9);
    world.allocate("disk", Restore::file, 11);
    world.allocate("weights", Restore::host, 20);
    world.allocate("weights", Restore::host, 1);
  };
  World::Options two_devices;
  two_devices.devices = 2;
  two_devices.settings.verify = VerifyChoice::full;
  World::Options full;
  full.settings.verify = VerifyChoice::full;

  const auto named_files = [](World& world) {
    // What a process left that was killed before it took the name away.
    const std::string left_behind = World::file_folder + "/memsaver-backup-000000";
    close(open(left_behind.c_str(), O_CREAT | O_WRONLY, 0600));
    world.allocate("disk", Restore::file, 11);
  };
  list.push_back({"allocate", {}, nothing, [](World& world) { world.allocate("t", Restore::zero, 3); }, {}});
  list.push_back(
      {"allocate kept, several chunks", {}, nothing, [](World& world) { world.allocate("t", Restore::host, 50); }, {}});
  list.push_back({"allocate under a released tag",
                  {},
                  [](World& world) {
                    world.allocate("t", Restore::host, 6);
                    world.release();
                  },
                  [](World& world) { world.allocate("t", Restore::host, 6); },
                  [](World& world) { world.resume(); }});
  list.push_back({"allocate twice, one device each",
                  two_devices,
                  nothing,
                  [](World& world) {
                    world.allocate("t", Restore::host, 3, 0);
                    world.allocate("t", Restore::host, 3, 1);
                  },
                  {}});
  list.push_back(
      {"free", {}, fill(Restore::host), [](World& world) { world.free(1); }, [](World& world) { world.release(); }});
  list.push_back({"free inside of a shared chunk, then the rest of it",
                  {},
                  [](World& world) {
                    for (int i = 0; i < 4; ++i) world.allocate("t", Restore::discard, 2);
                    world.release();
                    world.resume();
                  },
                  [](World& world) {
                    for (const std::size_t number : {1u, 2u, 0u, 3u}) world.free(number);
                  },
                  [](World& world) { world.allocate("t", Restore::discard, 2); }});
  list.push_back({"free while released",
                  {},
                  [](World& world) {
                    world.allocate("t", Restore::host, 6);
                    world.allocate("t", Restore::file, 6);
                    world.allocate("t", Restore::host, 6);
                    world.release();
                  },
                  [](World& world) {
                    world.free(0);
                    world.free(1);
                  },
                  [](World& world) { world.resume(); }});
  for (const Restore restore : {Restore::discard, Restore::zero, Restore::host, Restore::file}) {
    list.push_back(release_of(std::string("release, ") + name_of(restore), fill(restore)));
    list.push_back(resume_of(std::string("resume, ") + name_of(restore), fill(restore), full));
  }
  list.push_back(release_of("release, every policy", every_policy));
  list.push_back(release_of("release to a file that has a name at first", named_files));
  list.back().without_unnamed_files = true;
  list.push_back(resume_of("resume, every policy", every_policy, full));
  const auto on_two = [](World& world) {
    for (const int device : {0, 1}) {
      world.allocate("weights", Restore::host, 14, device);
      world.allocate("cache", Restore::zero, 3, device);
      world.allocate("disk", Restore::file, 6, device);
    }
  };
  list.push_back(release_of("release, two devices", on_two, two_devices));
  list.push_back(resume_of("resume, two devices", on_two, two_devices));
  list.push_back({"release of one tag after another",
                  {},
                  every_policy,
                  [](World& world) {
                    world.release({"cache"});
                    world.release({"weights"});
                    world.release();
                  },
                  [](World& world) { world.resume(); }});
  list.push_back({"resume of one tag after another", full,
                  [every_policy](World& world) {
                    every_policy(world);
                    world.release();
                  },
                  [](World& world) {
                    world.resume({"weights"});
                    world.resume({"cache", "disk"});
                    world.resume();
                  },
                  [](World& world) { world.release(); }});
  // The pool of a CUDA graph is memory under a tag of its own. Its content is kept, because replays read there what the
  // capture wrote, and each replay writes to it; or it is given up, and the graph with it.
  const auto captured = [](World& world) {
    for (const int device : {0, 1}) {
      world.allocate("weights", Restore::host, 3, device);
      world.allocate("cuda_graph", Restore::host, 6, device);
      world.allocate("kv_cache", Restore::zero, 2, device);
    }
    world.release();
    world.resume();
    for (const std::size_t pool : {1u, 4u}) world.rewrite(pool, 2, 3);
  };
  list.push_back(release_of("release, graphs", captured, two_devices));
  list.push_back(resume_of("resume, graphs", captured, two_devices));
  list.push_back({"graphs alone, then what they read", two_devices, captured,
                  [](World& world) {
                    world.release({"cuda_graph"});
                    world.resume({"cuda_graph"});
                    for (const std::size_t pool : {1u, 4u}) world.rewrite(pool, 0, 2);
                    world.release({"cuda_graph", "kv_cache"});
                    world.resume({"kv_cache"});
                    world.resume();
                  },
                  [](World& world) { world.release(); }});
  list.push_back({"graphs given up", two_devices, captured,
                  [](World& world) {
                    world.release({}, {{"cuda_graph", Restore::discard}});
                    world.saver->trim_graph_memory();
                    world.resume();
                  },
                  [](World& world) { world.release(); }});
  // Another policy for one release.
  const std::vector<std::pair<Restore, Restore>> overrides = {
      {Restore::host, Restore::discard}, {Restore::host, Restore::zero}, {Restore::host, Restore::file},
      {Restore::file, Restore::host},    {Restore::zero, Restore::host}, {Restore::discard, Restore::zero}};
  for (const auto& [usual, now] : overrides) {
    list.push_back({std::string("override ") + name_of(usual) + " by " + name_of(now), full,
                    [usual = usual](World& world) {
                      world.allocate("t", usual, 20);
                      world.release();
                      world.resume();
                      world.rewrite(0, 2, 9);
                    },
                    [now = now](World& world) {
                      world.release({}, {{"t", now}});
                      world.resume();
                    },
                    [](World& world) { world.release(); }});
  }
  list.push_back({"released in two parts under two policies", full,
                  [](World& world) {
                    world.allocate("t", Restore::zero, 6);
                    world.release();
                    world.allocate("t", Restore::zero, 6);
                  },
                  [](World& world) {
                    world.release({}, {{"t", Restore::host}});
                    world.resume();
                  },
                  [](World& world) { world.release({}, {{"t", Restore::discard}}); }});
  World::Options unverified;
  unverified.settings.verify = VerifyChoice::off;
  for (const auto& [name, options] : {std::pair("released in two parts, kept first", full),
                                      std::pair("released in two parts, kept first, unverified", unverified)}) {
    list.push_back({name, options,
                    [](World& world) {
                      world.allocate("t", Restore::host, 10);
                      world.release();
                      world.allocate("t", Restore::host, 10);
                    },
                    [](World& world) {
                      world.release({}, {{"t", Restore::zero}});
                      world.resume();
                    },
                    [](World& world) { world.release({}, {{"t", Restore::discard}}); }});
  }
  // What an earlier cycle left: equal content, changed content, holes, a failure.
  list.push_back(release_of("release, content unchanged", [](World& world) {
    world.allocate("t", Restore::host, 20);
    world.allocate("f", Restore::file, 20);
    world.release();
    world.resume();
  }));
  list.push_back(release_of("release, content changed in part", [](World& world) {
    world.allocate("t", Restore::host, 20);
    world.allocate("f", Restore::file, 20);
    world.release();
    world.resume();
    world.rewrite(0, 3, 6);
    world.rewrite(1, 3, 6);
  }));
  const auto with_zeros = [](World& world) {
    world.allocate("t", Restore::host, 10);
    const std::size_t zeros = world.allocate("t", Restore::host, 10);
    world.write_zeros(zeros);
    const std::size_t file = world.allocate("f", Restore::file, 12);
    world.mark_dead(0, 2, 3);
    world.mark_dead(file, 1, 6);
  };
  list.push_back(release_of("release, dead ranges and zeros", with_zeros));
  list.push_back(resume_of("resume, dead ranges and zeros", with_zeros, full));
  const auto churned = [](Restore restore) {
    return [restore](World& world) {
      for (int i = 0; i < 8; ++i) world.allocate("t", restore, 2);
      world.release();
      world.resume();
      for (const std::size_t number : {1u, 2u, 5u}) world.free(number);
      world.allocate("t", restore, 2);
      world.allocate("t", restore, 12);
    };
  };
  list.push_back(release_of("release, churned, kept", churned(Restore::host)));
  list.push_back(resume_of("resume, churned, kept", churned(Restore::host), full));
  list.push_back(release_of("release, churned, discarded", churned(Restore::discard)));
  const auto half_released = [](World& world) {
    world.allocate("t", Restore::host, 40);
    world.release();
    world.resume();
    world.rewrite(0, 0, 40);
    world.faulty->fail("unmap", 2, ErrorKind::driver, 1);
    try {
      world.release();
    } catch (const Error&) {
      // In its middle: some of it is released, some not.
    }
    world.faulty->heal();
  };
  list.push_back(release_of("release after one that failed", half_released));
  list.push_back({"release as zeros after one that failed", full, half_released,
                  [](World& world) {
                    world.release({}, {{"t", Restore::zero}});
                    world.resume();
                  },
                  [](World& world) { world.resume(); }});
  for (const Retention retention : {Retention::trim, Retention::free}) {
    World::Options options;
    options.settings.retention = retention;
    list.push_back(resume_of(
        retention == Retention::trim ? "resume, trim" : "resume, free",
        [](World& world) {
          world.allocate("t", Restore::host, 20);
          world.allocate("z", Restore::zero, 2);
        },
        options));
  }
  for (const VerifyChoice verify : {VerifyChoice::off, VerifyChoice::sampled}) {
    World::Options options;
    options.settings.verify = verify;
    list.push_back(
        resume_of(verify == VerifyChoice::off ? "resume, unverified" : "resume, sampled", every_policy, options));
  }
  list.push_back({"prepare, then release",
                  {},
                  fill(Restore::host),
                  [](World& world) {
                    world.saver->prepare_backup();
                    world.saver->wait_until_prepared();
                    world.release();
                  },
                  [](World& world) { world.resume(); }});
  return list;
}

struct Fault {
  std::string call;
  bool of_system = false;
  ErrorKind kind = ErrorKind::driver;
  int code = 0;
  bool once_only = false;
};

// The errors that each call may give.
std::vector<Fault> faults_of(const std::string& call, bool of_system) {
  if (!of_system) {
    std::vector<Fault> faults{{call, false, ErrorKind::driver}, {call, false, ErrorKind::context_lost, 0, true}};
    if (call == "create") faults.push_back({call, false, ErrorKind::out_of_device_memory});
    if (call == "register_host") faults.push_back({call, false, ErrorKind::out_of_host_memory});
    return faults;
  }
  const auto with = [&](std::vector<int> codes) {
    std::vector<Fault> faults;
    for (const int code : codes) faults.push_back({call, true, ErrorKind::driver, code, code == EINTR});
    return faults;
  };
  if (call == "mmap") return with({ENOMEM, EAGAIN});
  if (call == "pwrite") return with({ENOSPC, EDQUOT, EIO, EINTR, sys::kShort});
  if (call == "pread") return with({EIO, EINTR, sys::kShort});
  if (call == "fstatvfs") return with({EIO, EINTR});
  if (call == "open") return with({EMFILE, ENOSPC, EACCES, EOPNOTSUPP});
  if (call == "mkostemp") return with({EMFILE, EACCES});
  if (call == "fopen") return with({EMFILE, ENOMEM});
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
  // Once a context is lost, every call of every thread says so, and any of them may be first.
  if (text.find(fault.call) == std::string::npos && error.kind != ErrorKind::context_lost &&
      error.kind != ErrorKind::configuration && !(fault.call == "mkostemp" && text.find("open") != std::string::npos)) {
    missing("the call");
  }
  if (fault.call == "trim_graph_memory") return;  // what the driver caches is of no tag
  if (error.tag.empty()) missing("the tag");
  if (error.bytes == 0 && error.needed_bytes == 0) missing("the bytes");
  if (!fault.of_system && error.kind != fault.kind) world.problems.push_back("another kind of error: " + text);
  if (fault.of_system && fault.code == ENOSPC && error.kind != ErrorKind::out_of_host_memory) {
    world.problems.push_back("a full disk is another kind of error: " + text);
  }
}

// Runs one case. Whether the fault was met at all.
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
    const std::size_t times = for_good ? kForGood : 1;
    if (fault.of_system) {
      system_faults().plan(fault.call, nth, fault.code, times);
    } else {
      world.faulty->fail(fault.call, nth, fault.kind, times);
    }
    if (undo_fails != nullptr) {
      world.faulty->fail(undo_fails, 1, ErrorKind::driver, kForGood);
      world.undo_may_fail = true;
    }
    bool threw = false;
    try {
      scenario.act(world);
    } catch (const Error& error) {
      threw = true;
      if (error.kind == ErrorKind::context_lost && world.saver->status().failure.empty()) {
        world.problems.push_back("a lost context was told and not noted");
      }
      if (undo_fails == nullptr) check_error(error, fault, world);
    }
    met = fault.of_system ? system_faults().met() : world.faulty->failures() > 0;
    lost = fault.kind == ErrorKind::context_lost && !world.saver->status().failure.empty();
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
      // Nothing can work in this process any more, and every call says so.
      for (const auto& call : {std::function<void()>([&] { world.saver->release({}, {}, {}); }),
                               std::function<void()>([&] { world.saver->resume({}); }), std::function<void()>([&] {
                                 (void)world.saver->allocate({0, "t", Restore::zero}, 1);
                               })}) {
        try {
          call();
          world.problems.push_back("a call went well after the context was lost");
        } catch (const Error& error) {
          if (error.kind != ErrorKind::context_lost) world.problems.push_back(std::string("said: ") + error.what());
        }
      }
      if (world.saver->status().state != "failed") world.problems.push_back("the state is not failed");
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
  world.faulty = nullptr;
  system_faults().heal();
  for (const auto& problem : world.problems) totals.problems.push_back(current + ": " + problem);
  return met;
}

// Calls that the scenario makes, by name.
std::map<std::string, std::size_t> count_calls(const Scenario& scenario, bool of_system, Totals& totals) {
  current = scenario.name + " / without failures";
  World world(scenario.options);
  scenario.prepare(world);
  const auto counts = [&] {
    const std::lock_guard<std::mutex> lock(system_faults().mutex);
    return of_system ? system_faults().counts : world.faulty->counts();
  };
  auto before = counts();
  scenario.act(world);
  world.check();
  std::map<std::string, std::size_t> calls;
  for (const auto& [call, count] : counts()) {
    if (count > before[call]) calls[call] = count - before[call];
  }
  world.end(false);
  for (const auto& problem : world.problems) totals.problems.push_back(current + ": " + problem);
  return calls;
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
  for (const auto& scenario : scenarios()) {
    if (scenario.name.find(only) == std::string::npos) continue;
    ++number;
    system_faults().without_unnamed_files = scenario.without_unnamed_files;
    for (const bool of_system : {false, true}) {
      for (const auto& [call, occurrences] : count_calls(scenario, of_system, totals)) {
        for (std::size_t nth = 1; nth <= occurrences; ++nth) {
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
            for (const char* undo : {"unmap", "release", "synchronize"}) {
              if (planned++ % stride != 0) continue;
              if (call != undo) run_case(scenario, fault, nth, false, nth % 2 == 0 && scenario.opposite, undo, totals);
            }
          }
          if (reached) ++totals.calls;
        }
      }
    }
  }
  alarm(0);
  sys::hook = nullptr;
  if (rmdir(folder) != 0) totals.problems.push_back(std::string("files are left in ") + folder);
  std::size_t shown = 0;
  for (const auto& problem : totals.problems) {
    if (++shown > 60) break;
    std::printf("%s\n", problem.c_str());
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
