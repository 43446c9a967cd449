#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "driver/cuda_api.hpp"
#include "support/mutex.hpp"

namespace memsaver::cuda {

// Checks the results of driver calls, and remembers the first failure that lost the context.
class Calls {
 public:
  explicit Calls(const Api& driver_api) : api(driver_api) {}
  // Throws Error if `result`, of a call of `symbol`, is a failure.
  void check(const char* symbol, Result result) const;
  [[nodiscard]] std::string loss() const {
    const Lock lock(mutex_);
    return loss_;
  }

  const Api& api;

 private:
  mutable Mutex mutex_;
  mutable std::string loss_ GUARDED_BY(mutex_);
};

inline constexpr unsigned kDigestThreads = 256;

// Kernels that are compiled together at run time.
struct KernelSource {
  const char* name;     // of the set
  const char* text;     // CUDA C++
  const char* without;  // what is the case while they are missing
};
extern const KernelSource kDigestSource;
extern const KernelSource kPackingSource;

// One device: its primary context and what this process keeps in it. Any thread may call every function.
class CudaDevice {
 public:
  CudaDevice(const Calls& calls, int index);

  [[nodiscard]] const Calls& calls() const { return calls_; }
  [[nodiscard]] Device ordinal() const { return ordinal_; }
  [[nodiscard]] int attribute(int which, int otherwise) const;
  // The primary context, retained at the first call.
  [[nodiscard]] Context context() {
    const Lock lock(mutex_);
    return retained();
  }
  [[nodiscard]] bool has_context() {
    const Lock lock(mutex_);
    return context_ != nullptr;
  }
  // Of the memory to create. Throws ErrorKind::configuration if the device has no virtual memory management.
  [[nodiscard]] AllocationProperties properties();

  // An event that recycle() took back, or nullptr.
  [[nodiscard]] EventHandle idle_event();
  void recycle(EventHandle event) {
    const Lock lock(mutex_);
    idle_events_.push_back(event);
  }

  // Compiles kernels unless that was done before, without using the device.
  void prepare(const KernelSource& source) noexcept;
  // Whether kernel() works. Loads what prepare() compiled; compiles it only if `compile`.
  [[nodiscard]] bool has(const KernelSource& source, bool compile) noexcept;
  // Only after has() returned true.
  [[nodiscard]] Function kernel(const KernelSource& source, const char* name);

 private:
  [[nodiscard]] Context retained() REQUIRES(mutex_);
  struct Kernels {
    enum class State { unknown, ready, missing } state = State::unknown;
    std::string code;  // compiled, and not loaded yet
    Module module = nullptr;
    std::map<std::string, Function> functions;
    [[nodiscard]] bool known() const { return state != State::unknown || !code.empty(); }
  };
  void load(const KernelSource& source, Kernels& kernels) REQUIRES(mutex_);
  [[nodiscard]] std::string compile(const KernelSource& source) const;

  const Calls& calls_;
  Device ordinal_ = 0;
  Mutex mutex_;
  Context context_ GUARDED_BY(mutex_) = nullptr;
  AllocationProperties properties_ GUARDED_BY(mutex_){};
  std::vector<EventHandle> idle_events_ GUARDED_BY(mutex_);
  std::map<const char*, Kernels> kernels_ GUARDED_BY(mutex_);  // by name of the set
};

// Keeps stream captures of other threads valid: in their default mode, a call that cannot be part of a graph (such as
// registering host memory) invalidates them, unless the calling thread has declared itself unrelated.
class BesideCaptures {
 public:
  explicit BesideCaptures(const Api& api) : api_(api) { api_.exchange_capture_mode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  ~BesideCaptures() { api_.exchange_capture_mode(&mode_); }

 private:
  const Api& api_;
  int mode_ = kCaptureModeRelaxed;
};

// Makes a context current for a scope; the caller's is current again afterwards.
class CurrentContext {
 public:
  CurrentContext(const Calls& calls, Context context) : api_(calls.api) {
    calls.check("cuCtxPushCurrent", api_.context_push(context));
  }
  CurrentContext(const CurrentContext&) = delete;
  ~CurrentContext() {
    Context previous = nullptr;
    api_.context_pop(&previous);
  }

 private:
  const Api& api_;
};

// A scope for calls in the context of a device.
class InContext {
 public:
  explicit InContext(CudaDevice& device)
      : beside_captures_(device.calls().api), current_(device.calls(), device.context()) {}

 private:
  const BesideCaptures beside_captures_;
  const CurrentContext current_;
};

}  // namespace memsaver::cuda
