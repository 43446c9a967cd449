// The hibernation helper: a process of its own, because the CUDA driver checkpoints a process on behalf of another
// only.
//
// Started by the engine's process with one end of a socket pair as its standard input and output, and that process's id
// as its argument. It reads one request a line and answers each with one line:
//
//     hibernate <timeout in ms>  -> ok <lock s> <checkpoint s>     all device memory of the process is given back
//     wake                       -> ok <restore s> <unlock s>      it is there again, and CUDA calls go on
//     state                      -> ok <running | locked | checkpointed | failed>
//     memory <uuid of a device>  -> ok <total> <used> <used by the process>, bytes, as nvidia-smi shows them: NVML
//     waits
//                                   in a process that is checkpointed, like all of CUDA
//
// or "error <call> <code> <state of the process now>". A step that fails is undone as far as the driver lets it.
// It ends when the socket is closed or its parent dies, and holds no device memory of its own. (Not by
// PR_SET_PDEATHSIG: that is tied to the thread that started it, which may be short-lived.)

#include <dlfcn.h>
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

using Result = int;
constexpr Result kSuccess = 0;

// Layouts of CUDA 12.8 and later; all reserved bytes are zero.
struct LockArguments {
  unsigned timeout_ms = 0;
  unsigned reserved0 = 0;
  std::uint64_t reserved1[7] = {};
};
struct OtherArguments {
  std::uint64_t reserved[8] = {};
};

struct Api {
  Result (*init)(unsigned);
  Result (*get_error_name)(Result, const char**);
  Result (*get_state)(int, int*);
  Result (*lock)(int, LockArguments*);
  Result (*checkpoint)(int, OtherArguments*);
  Result (*restore)(int, OtherArguments*);
  Result (*unlock)(int, OtherArguments*);
};

bool load(Api& api) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return false;
  bool complete = true;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    complete = complete && function != nullptr;
  };
  find(api.init, "cuInit");
  find(api.get_error_name, "cuGetErrorName");
  find(api.get_state, "cuCheckpointProcessGetState");
  find(api.lock, "cuCheckpointProcessLock");
  find(api.checkpoint, "cuCheckpointProcessCheckpoint");
  find(api.restore, "cuCheckpointProcessRestore");
  find(api.unlock, "cuCheckpointProcessUnlock");
  return complete;
}

// The part of NVML that we call; layouts of its versions 2 and 3, which it keeps.
class Nvml {
 public:
  // "ok ..." or "error ..."
  std::string memory_of(const std::string& uuid, int process) {
    if (!load()) return "error libnvidia-ml NVML_ERROR_LIBRARY_NOT_FOUND unknown";
    void* device = nullptr;
    if (handle_by_uuid_(uuid.c_str(), &device) != 0) return "error nvmlDeviceGetHandleByUUID NVML_ERROR unknown";
    Memory memory{sizeof(Memory) | 2u << 24, 0, 0, 0, 0};
    if (memory_(device, &memory) != 0) return "error nvmlDeviceGetMemoryInfo_v2 NVML_ERROR unknown";
    unsigned count = kProcesses;
    unsigned long long mine = 0;
    if (processes_(device, &count, list_) == 0) {
      for (unsigned i = 0; i < count; ++i) {
        if (list_[i].pid == static_cast<unsigned>(process) && list_[i].used != ~0ull) mine += list_[i].used;
      }
    }
    return "ok " + std::to_string(memory.total) + " " + std::to_string(memory.used) + " " + std::to_string(mine);
  }

 private:
  struct Memory {
    unsigned version;
    unsigned long long total, reserved, free, used;
  };
  struct Process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
  };
  static constexpr unsigned kProcesses = 256;

  bool load() {
    if (processes_ != nullptr) return true;
    void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    handle_by_uuid_ = reinterpret_cast<int (*)(const char*, void**)>(dlsym(library, "nvmlDeviceGetHandleByUUID"));
    memory_ = reinterpret_cast<int (*)(void*, Memory*)>(dlsym(library, "nvmlDeviceGetMemoryInfo_v2"));
    const auto processes = reinterpret_cast<int (*)(void*, unsigned*, Process*)>(
        dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3"));
    if (init == nullptr || handle_by_uuid_ == nullptr || memory_ == nullptr || processes == nullptr || init() != 0) {
      return false;
    }
    processes_ = processes;
    return true;
  }

  int (*handle_by_uuid_)(const char*, void**) = nullptr;
  int (*memory_)(void*, Memory*) = nullptr;
  int (*processes_)(void*, unsigned*, Process*) = nullptr;
  Process list_[kProcesses] = {};
};

class Helper {
 public:
  Helper(const Api& api, int process) : api_(api), process_(process) {}

  std::string answer(const std::string& request) {
    if (request.rfind("hibernate ", 0) == 0) return hibernate(std::strtoul(request.c_str() + 10, nullptr, 10));
    if (request == "wake") return wake();
    if (request == "state") return std::string("ok ") + state();
    if (request.rfind("memory ", 0) == 0) return nvml_.memory_of(request.substr(7), process_);
    return "error request UNKNOWN " + std::string(state());
  }

 private:
  // The driver's own account of the process. A process without a context yet counts as running.
  const char* state() {
    int value = 0;
    if (api_.get_state(process_, &value) != kSuccess) return "unknown";
    constexpr const char* names[] = {"running", "locked", "checkpointed", "failed"};
    return value >= 0 && value < 4 ? names[value] : "unknown";
  }

  std::string failure(const char* call, Result result) {
    const char* name = nullptr;
    api_.get_error_name(result, &name);
    return std::string("error ") + call + " " + (name != nullptr ? name : std::to_string(result).c_str()) + " " +
           state();
  }

  std::string hibernate(unsigned long timeout_ms) {
    LockArguments lock;
    lock.timeout_ms = static_cast<unsigned>(timeout_ms);
    OtherArguments none;
    const double start = now();
    if (const Result result = api_.lock(process_, &lock); result != kSuccess) {
      return failure("cuCheckpointProcessLock", result);
    }
    const double locked = now();
    if (const Result result = api_.checkpoint(process_, &none); result != kSuccess) {
      OtherArguments undo;
      api_.unlock(process_, &undo);
      return failure("cuCheckpointProcessCheckpoint", result);
    }
    return done(locked - start, now() - locked);
  }

  std::string wake() {
    OtherArguments none;
    const double start = now();
    // A wake whose unlock failed before is taken up where it stopped.
    if (std::strcmp(state(), "locked") != 0) {
      if (const Result result = api_.restore(process_, &none); result != kSuccess) {
        return failure("cuCheckpointProcessRestore", result);
      }
    }
    const double restored = now();
    OtherArguments unlock;
    if (const Result result = api_.unlock(process_, &unlock); result != kSuccess) {
      return failure("cuCheckpointProcessUnlock", result);
    }
    return done(restored - start, now() - restored);
  }

  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  static std::string done(double first, double second) {
    char text[64];
    std::snprintf(text, sizeof text, "ok %.6f %.6f", first, second);
    return text;
  }

  const Api& api_;
  const int process_;
  Nvml nvml_;
};

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) return 2;
  const int process = std::atoi(arguments[1]);
  Api api{};
  const char* problem = nullptr;
  if (!load(api)) {
    problem = "error libcuda CUDA_ERROR_NOT_SUPPORTED unknown";
  } else if (api.init(0) != kSuccess) {
    problem = "error cuInit CUDA_ERROR_NOT_INITIALIZED unknown";
  }
  Helper helper(api, process);
  std::string line;
  pollfd input{STDIN_FILENO, POLLIN, 0};
  for (;;) {
    // A child that the engine forked may hold the other end open after the engine's death.
    if (poll(&input, 1, 1000) == 0) {
      if (getppid() != process) return 0;
      continue;
    }
    char byte;
    if (read(STDIN_FILENO, &byte, 1) != 1) return 0;
    if (byte != '\n') {
      line += byte;
      continue;
    }
    const std::string answer = (problem != nullptr ? std::string(problem) : helper.answer(line)) + "\n";
    line.clear();
    if (write(STDOUT_FILENO, answer.data(), answer.size()) != static_cast<ssize_t>(answer.size())) return 1;
  }
}
