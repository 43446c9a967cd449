#include <dlfcn.h>

#include <cstdint>
#include <type_traits>

#include "driver/nvml.hpp"
#include "hibernate/process.hpp"

namespace memsaver::hibernate {

namespace {

using Result = int;
constexpr Result kSuccess = 0;

// After a restore that runs out of device memory, driver 580 cannot restore the process any more, even with enough free
// memory. So restore() requires this much more than the process held.
constexpr std::size_t kSpareBytes = std::size_t{64} << 20;

// The arguments of each step, as CUDA 12.8 and later lay them out; all but a lock's timeout are zero.
struct Arguments {
  unsigned timeout_ms;
  unsigned reserved0;
  std::uint64_t reserved1[7];
};
struct Step {
  const char* name;
  Result (*function)(int, Arguments*) = nullptr;
};

class CudaProcess final : public Process {
 public:
  explicit CudaProcess(int pid) : pid_(pid) {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw StepError("libcuda", "CUDA_ERROR_NOT_SUPPORTED");
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) throw StepError(name, "CUDA_ERROR_NOT_SUPPORTED");
    };
    Result (*init)(unsigned) = nullptr;
    find(init, "cuInit");
    find(get_error_name_, "cuGetErrorName");
    find(get_state_, "cuCheckpointProcessGetState");
    for (Step* const step : {&lock_, &checkpoint_, &restore_, &unlock_}) find(step->function, step->name);
    check("cuInit", init(0));
  }

  // A process without a context yet counts as running.
  const char* state() override {
    int value = 0;
    if (get_state_(pid_, &value) != kSuccess) return "unknown";
    constexpr const char* names[] = {"running", "locked", "checkpointed", "failed"};
    return value >= 0 && value < 4 ? names[value] : "unknown";
  }

  void lock(unsigned timeout_ms) override { take(lock_, timeout_ms); }

  ByDevice checkpoint(const std::vector<std::string>& devices) override {
    ByDevice before;  // what the process holds of each device that NVML lists it on
    for (const auto& uuid : devices) {
      const auto memory = nvml::memory_of(uuid, {pid_});
      if (memory && memory->process_bytes != 0) before[uuid] = memory->process_bytes;
    }
    take(checkpoint_);
    ByDevice held;
    for (const auto& [uuid, used] : before) {
      const auto now = nvml::memory_of(uuid, {pid_});
      if (now && used > now->process_bytes) held[uuid] = used - now->process_bytes;
    }
    return held;
  }

  void restore(const ByDevice& held) override {
    for (const auto& [uuid, bytes] : held) {
      const auto now = nvml::memory_of(uuid, {pid_});
      if (now && now->free_bytes < bytes + kSpareBytes) {
        throw StepError(restore_.name, "CUDA_ERROR_OUT_OF_MEMORY", uuid, bytes + kSpareBytes, now->free_bytes);
      }
    }
    take(restore_);
  }

  void unlock() override { take(unlock_); }

 private:
  void take(const Step& step, unsigned timeout_ms = 0) {
    Arguments arguments{timeout_ms, 0, {}};
    check(step.name, step.function(pid_, &arguments));
  }
  void check(const char* call, Result result) {
    if (result == kSuccess) return;
    const char* name = nullptr;
    get_error_name_(result, &name);
    throw StepError(call, name != nullptr ? name : "CUDA_ERROR_" + std::to_string(result));
  }

  const int pid_;
  Result (*get_error_name_)(Result, const char**) = nullptr;
  Result (*get_state_)(int, int*) = nullptr;
  Step lock_{"cuCheckpointProcessLock"}, checkpoint_{"cuCheckpointProcessCheckpoint"};
  Step restore_{"cuCheckpointProcessRestore"}, unlock_{"cuCheckpointProcessUnlock"};
};

}  // namespace

std::unique_ptr<Process> open_cuda_process(int pid) { return std::make_unique<CudaProcess>(pid); }

}  // namespace memsaver::hibernate
