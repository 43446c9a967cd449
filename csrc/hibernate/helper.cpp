#include "hibernate/helper.hpp"

#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <sstream>

#include "driver/nvml.hpp"

namespace memsaver::hibernate {
namespace {

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

class Helper {
 public:
  explicit Helper(std::unique_ptr<Process> process) : process_(std::move(process)) {}

  // Answers one request; never throws.
  std::string answer(const std::string& line) {
    std::istringstream words(line);
    std::string request;
    words >> request;
    try {
      if (request == "state") return std::string("ok ") + process_->state();
      if (request == "memory") return memory(words);
      if (request == "lock" || request == "checkpoint" || request == "restore" || request == "unlock") {
        const double start = now();
        const std::string more = take(request, words);
        char text[32];
        std::snprintf(text, sizeof text, "ok %.6f", now() - start);
        return text + more;
      }
    } catch (const StepError& error) {
      std::string text = "error " + error.call + " " + error.code + " " + process_->state();
      if (error.needed_bytes != 0) {
        text += " " + error.device + " " + std::to_string(error.needed_bytes) + " " + std::to_string(error.free_bytes);
      }
      return text;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "memsaver-hibernate: %s: %s\n", request.c_str(), error.what());
    }
    return std::string("error request UNKNOWN ") + process_->state();
  }

 private:
  // Takes a step unless the process has taken it. Returns what follows the time in the answer.
  std::string take(const std::string& step, std::istringstream& words) {
    const std::string state = process_->state();
    std::string text;
    if (step == "lock") {
      unsigned timeout_ms = 0;
      words >> timeout_ms;
      if (state != "locked" && state != "checkpointed") process_->lock(timeout_ms);
    } else if (step == "checkpoint" && state != "checkpointed") {
      const std::vector<std::string> devices{std::istream_iterator<std::string>(words), {}};
      for (const auto& [device, bytes] : process_->checkpoint(devices))
        text += " " + device + " " + std::to_string(bytes);
    } else if (step == "restore" && state != "locked" && state != "running") {
      ByDevice held;
      std::string device;
      for (std::size_t bytes = 0; words >> device >> bytes;) held[device] = bytes;
      process_->restore(held);
    } else if (step == "unlock" && state != "running") {
      process_->unlock();
    }
    return text;
  }

  static std::string memory(std::istringstream& words) {
    std::string uuid;
    words >> uuid;
    const auto memory = nvml::memory_of(uuid, {std::istream_iterator<int>(words), std::istream_iterator<int>()});
    if (!memory) throw StepError("nvmlDeviceGetMemoryInfo_v2", "NVML_ERROR");
    return "ok " + std::to_string(memory->total_bytes) + " " + std::to_string(memory->used_bytes) + " " +
           std::to_string(memory->process_bytes);
  }

  std::unique_ptr<Process> process_;
};

// Answers until the socket is closed or the parent has died. Without a helper every answer is `problem`.
int serve(int parent, Helper* helper, const std::string& problem) {
  std::string line;
  pollfd input{STDIN_FILENO, POLLIN, 0};
  for (;;) {
    // The socket may outlive the engine: children that it forked hold the other end open.
    if (poll(&input, 1, 1000) == 0) {
      if (getppid() != parent) return 0;
      continue;
    }
    char byte;
    if (read(STDIN_FILENO, &byte, 1) != 1) return 0;
    if (byte != '\n') {
      line += byte;
      continue;
    }
    const std::string answer = (helper != nullptr ? helper->answer(line) : problem) + "\n";
    line.clear();
    if (write(STDOUT_FILENO, answer.data(), answer.size()) != static_cast<ssize_t>(answer.size())) return 1;
  }
}

}  // namespace

int run_helper(const std::vector<std::string>& arguments, const ProcessAdaptor& adapt) {
  if (arguments.size() < 2) return 2;
  const int pid = std::atoi(arguments[0].c_str());
  std::unique_ptr<Helper> helper;
  std::string problem;
  try {
    auto process =
        arguments[1] == "host" ? open_host_process({arguments.begin() + 2, arguments.end()}) : open_cuda_process(pid);
    if (adapt) process = adapt(std::move(process));
    helper = std::make_unique<Helper>(std::move(process));
  } catch (const StepError& error) {
    problem = "error " + error.call + " " + error.code + " unknown";
  } catch (const std::exception& error) {
    std::fprintf(stderr, "memsaver-hibernate: %s\n", error.what());
    return 2;
  }
  return serve(pid, helper.get(), problem);
}

}  // namespace memsaver::hibernate
