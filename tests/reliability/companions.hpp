#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "world.hpp"

namespace memsaver {

// Other processes of a shared store, which keep packed content in it from their start to their end. Made before this
// process has threads.
class Companions {
 public:
  static World::Options options() {
    World::Options weights;
    weights.weights = true;
    weights.settings.verify = VerifyChoice::full;
    weights.settings.shared_backups = "every-call-together-" + std::to_string(founder);
    return weights;
  }
  // The same content in all processes. Returns the number of the allocation.
  static std::size_t fill(World& world) { return world.allocate("w", Restore::host, 44); }

  explicit Companions(int count) {
    while (static_cast<int>(processes_.size()) < count) processes_.push_back(start());
  }
  // Whether each of them has its content back, and nothing but that was in the store.
  [[nodiscard]] bool end() {
    bool well = true;
    for (const auto& process : processes_) {
      int status = 0;
      close(process.end);
      well = waitpid(process.id, &status, 0) == process.id && status == 0 && well;
    }
    return well;
  }

 private:
  struct Process {
    pid_t id;
    int end;  // of a pipe; the process lives until it is closed
  };
  static inline const pid_t founder = getpid();

  Process start() {
    int to_end[2];
    int to_begin[2];
    if (pipe2(to_end, O_CLOEXEC) != 0 || pipe2(to_begin, O_CLOEXEC) != 0) std::abort();
    const pid_t id = fork();
    if (id == 0) {
      for (const auto& other : processes_) close(other.end);
      close(to_end[1]);
      _exit(live(to_begin[1], to_end[0]));
    }
    char ready = 0;
    close(to_begin[1]);
    if (read(to_begin[0], &ready, 1) != 1) std::abort();
    close(to_begin[0]);
    close(to_end[0]);
    return {id, to_end[1]};
  }

  static int live(int began, int end) {
    World world(options());
    fill(world);
    world.release();
    world.check_packed("w");
    const std::size_t used = world.saver->status().shared.used_bytes;
    (void)!write(began, "r", 1);
    char none = 0;
    (void)!read(end, &none, 1);
    // What a failed release was writing is used again a little later.
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    bool alone = false;
    while (!alone && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      alone = world.saver->status().shared.used_bytes == used;
    }
    world.resume();
    world.check();
    if (!alone) world.problems.push_back("the store has more than what is kept in it");
    for (const auto& problem : world.problems) std::printf("another process: %s\n", problem.c_str());
    std::fflush(stdout);
    return world.problems.empty() ? 0 : 1;
  }

  std::vector<Process> processes_;
};

}  // namespace memsaver
