#include <dlfcn.h>

#include <cstdint>
#include <type_traits>

#include "hibernate/nvml.hpp"
#include "hibernate/process.hpp"

namespace memsaver::hibernate {

namespace {

using Result = int;
constexpr Result kSuccess = 0;

// After a restore that runs out of device memory, driver 580 cannot restore the process any more, even with enough free
// memory. So restore() requires this much more than the process held.
constexpr std::size_t kSpareBytes = std::size_t{64} << 20;

// Layouts of CUDA 12.8 and later; all reserved bytes are zero.
struct LockArguments {
  unsigned timeout_ms = 0;
  unsigned reserved0 = 0;
  std::uint64_t reserved1[7] = {};
};
struct OtherArguments {
  std::uint64_t reserved[8] = {};
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
    find(lock_, "cuCheckpointProcessLock");
    find(checkpoint_, "cuCheckpointProcessCheckpoint");
    find(restore_, "cuCheckpointProcessRestore");
    find(unlock_, "cuCheckpointProcessUnlock");
    check("cuInit", init(0));
  }

  // A process without a context yet counts as running.
  const char* state() override {
    int value = 0;
    if (get_state_(pid_, &value) != kSuccess) return "unknown";
    constexpr const char* names[] = {"running", "locked", "checkpointed", "failed"};
    return value >= 0 && value < 4 ? names[value] : "unknown";
  }

  void lock(unsigned timeout_ms) override {
    LockArguments arguments;
    arguments.timeout_ms = timeout_ms;
    check("cuCheckpointProcessLock", lock_(pid_, &arguments));
  }

  ByDevice checkpoint(const ByDevice& devices) override {
    ByDevice before;  // what the process holds of each device that NVML lists it on
    for (const auto& [uuid, unused] : devices) {
      const auto memory = memory_of(uuid, {pid_});
      if (memory && memory->process_bytes != 0) before[uuid] = memory->process_bytes;
    }
    OtherArguments arguments;
    check("cuCheckpointProcessCheckpoint", checkpoint_(pid_, &arguments));
    ByDevice held;
    for (const auto& [uuid, used] : before) {
      const auto now = memory_of(uuid, {pid_});
      if (now && used > now->process_bytes) held[uuid] = used - now->process_bytes;
    }
    return held;
  }

  void restore(const ByDevice& held) override {
    for (const auto& [uuid, bytes] : held) {
      const auto now = memory_of(uuid, {pid_});
      if (now && now->free_bytes < bytes + kSpareBytes) {
        throw StepError("cuCheckpointProcessRestore", "CUDA_ERROR_OUT_OF_MEMORY", uuid, bytes + kSpareBytes,
                        now->free_bytes);
      }
    }
    OtherArguments arguments;
    check("cuCheckpointProcessRestore", restore_(pid_, &arguments));
  }

  void unlock() override {
    OtherArguments arguments;
    check("cuCheckpointProcessUnlock", unlock_(pid_, &arguments));
  }

 private:
  void check(const char* call, Result result) {
    if (result == kSuccess) return;
    const char* name = nullptr;
    get_error_name_(result, &name);
    throw StepError(call, name != nullptr ? name : "CUDA_ERROR_" + std::to_string(result));
  }

  const int pid_;
  Result (*get_error_name_)(Result, const char**) = nullptr;
  Result (*get_state_)(int, int*) = nullptr;
  Result (*lock_)(int, LockArguments*) = nullptr;
  Result (*checkpoint_)(int, OtherArguments*) = nullptr;
  Result (*restore_)(int, OtherArguments*) = nullptr;
  Result (*unlock_)(int, OtherArguments*) = nullptr;
};

}  // namespace

std::unique_ptr<Process> open_cuda_process(int pid) { return std::make_unique<CudaProcess>(pid); }

}  // namespace memsaver::hibernate
