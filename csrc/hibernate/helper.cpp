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

// Takes a step unless the process has taken it. Returns what follows the time in the answer.
std::string take(Process& process, const std::string& step, std::istringstream& words) {
  const std::string state = process.state();
  std::string text;
  if (step == "lock") {
    unsigned timeout_ms = 0;
    words >> timeout_ms;
    if (state != "locked" && state != "checkpointed") process.lock(timeout_ms);
  } else if (step == "checkpoint" && state != "checkpointed") {
    const std::vector<std::string> devices{std::istream_iterator<std::string>(words), {}};
    for (const auto& [device, bytes] : process.checkpoint(devices)) text += " " + device + " " + std::to_string(bytes);
  } else if (step == "restore" && state != "locked" && state != "running") {
    ByDevice held;
    std::string device;
    for (std::size_t bytes = 0; words >> device >> bytes;) held[device] = bytes;
    process.restore(held);
  } else if (step == "unlock" && state != "running") {
    process.unlock();
  }
  return text;
}

std::string memory(std::istringstream& words) {
  std::string uuid;
  words >> uuid;
  const auto memory = nvml::memory_of(uuid, {std::istream_iterator<int>(words), std::istream_iterator<int>()});
  if (!memory) throw StepError("nvmlDeviceGetMemoryInfo_v2", "NVML_ERROR");
  return "ok " + std::to_string(memory->total_bytes) + " " + std::to_string(memory->used_bytes) + " " +
         std::to_string(memory->process_bytes);
}

// Answers one request; never throws.
std::string answer(Process& process, const std::string& line) {
  std::istringstream words(line);
  std::string request;
  words >> request;
  try {
    if (request == "state") return std::string("ok ") + process.state();
    if (request == "memory") return memory(words);
    if (request == "lock" || request == "checkpoint" || request == "restore" || request == "unlock") {
      const double start = now();
      const std::string more = take(process, request, words);
      char text[32];
      std::snprintf(text, sizeof text, "ok %.6f", now() - start);
      return text + more;
    }
  } catch (const StepError& error) {
    std::string text = "error " + error.call + " " + error.code + " " + process.state();
    if (error.needed_bytes != 0) {
      text += " " + error.device + " " + std::to_string(error.needed_bytes) + " " + std::to_string(error.free_bytes);
    }
    return text;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "memsaver-hibernate: %s: %s\n", request.c_str(), error.what());
  }
  return std::string("error request UNKNOWN ") + process.state();
}

// Answers until the socket is closed or the parent has died. Without a process every answer is `problem`.
int serve(int parent, Process* process, const std::string& problem) {
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
    const std::string text = (process != nullptr ? answer(*process, line) : problem) + "\n";
    line.clear();
    if (write(STDOUT_FILENO, text.data(), text.size()) != static_cast<ssize_t>(text.size())) return 1;
  }
}

}  // namespace

int run_helper(const std::vector<std::string>& arguments, const ProcessAdaptor& adapt) {
  if (arguments.size() < 2) return 2;
  const int pid = std::atoi(arguments[0].c_str());
  std::unique_ptr<Process> process;
  std::string problem;
  try {
    process =
        arguments[1] == "host" ? open_host_process({arguments.begin() + 2, arguments.end()}) : open_cuda_process(pid);
    if (adapt) process = adapt(std::move(process));
  } catch (const StepError& error) {
    problem = "error " + error.call + " " + error.code + " unknown";
  } catch (const std::exception& error) {
    std::fprintf(stderr, "memsaver-hibernate: %s\n", error.what());
    return 2;
  }
  return serve(pid, process.get(), problem);
}

}  // namespace memsaver::hibernate
