#include "driver/cuda_device.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "driver/nvrtc.hpp"
#include "driver/packing_kernels.hpp"
#include "support/error.hpp"
#include "support/log.hpp"

namespace memsaver::cuda {

namespace {

// After these errors the context is unusable for the rest of the process (cuda.h: "leaves the process in an
// inconsistent state", or a hardware fault). In order: ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED;
// ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, CONTEXT_IS_DESTROYED, ASSERT, HARDWARE_STACK_ERROR, ILLEGAL_INSTRUCTION,
// MISALIGNED_ADDRESS, INVALID_ADDRESS_SPACE, INVALID_PC, LAUNCH_FAILED, TENSOR_MEMORY_LEAK.
constexpr Result kLosesContext[] = {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721};

// support/digest.hpp on the device, one thread block per item. Eight 16-byte loads in flight per thread saturate the
// memory and hide the arithmetic (two 64 x 64 -> 128 products a word). __ldcs: the content is read once, so it should
// not evict the engine's lines from the cache.
constexpr const char* kDigestKernel = R"cuda(
typedef unsigned long long u64;

struct Key { u64 lane[4]; };
struct Item { u64 address; u64 bytes; u64 first_word; };
struct Digest { u64 lane0; u64 lane1; u64 any; };

#define WEYL 0x9E3779B97F4A7C15ull
#define WEYL2 0xD1B54A32D192ED03ull
#define THREADS 256
#define UNROLL 8

__device__ __forceinline__ u64 fold(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }

__device__ __forceinline__ void add(Digest& sum, const Key& key, ulonglong2 word, u64 index) {
  const u64 first = index * WEYL;
  const u64 second = index * WEYL2;
  sum.lane0 += fold(word.x ^ (key.lane[0] + first), word.y ^ (key.lane[1] + second));
  sum.lane1 += fold(word.x ^ (key.lane[2] + first), word.y ^ (key.lane[3] + second));
  sum.any |= word.x | word.y;
}

extern "C" __global__ void __launch_bounds__(THREADS) memsaver_digest(const Key key, const Item* items, Digest* results) {
  const Item item = items[blockIdx.x];
  const ulonglong2* data = reinterpret_cast<const ulonglong2*>(item.address);
  const u64 words = item.bytes / 16;
  Digest sum = {0, 0, 0};
  u64 at = threadIdx.x;
  for (; at + (UNROLL - 1) * THREADS < words; at += UNROLL * THREADS) {
    ulonglong2 word[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) word[i] = __ldcs(data + at + i * THREADS);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) add(sum, key, word[i], item.first_word + at + i * THREADS);
  }
  for (; at < words; at += THREADS) add(sum, key, __ldcs(data + at), item.first_word + at);

  for (int offset = 16; offset > 0; offset /= 2) {
    sum.lane0 += __shfl_down_sync(0xffffffffu, sum.lane0, offset);
    sum.lane1 += __shfl_down_sync(0xffffffffu, sum.lane1, offset);
    sum.any |= __shfl_down_sync(0xffffffffu, sum.any, offset);
  }
  __shared__ Digest warps[THREADS / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < THREADS / 32; ++i) {
      sum.lane0 += warps[i].lane0;
      sum.lane1 += warps[i].lane1;
      sum.any |= warps[i].any;
    }
    results[blockIdx.x] = sum;
  }
}
)cuda";

}  // namespace

const KernelSource kDigestSource{"digest", kDigestKernel,
                                 "content digests are off: every release copies everything, and nothing is verified"};
const KernelSource kPackingSource{"packing", kPackingKernels, "content is kept as it is, not packed"};

void Calls::check(const char* symbol, Result result) const {
  if (result == kSuccess) return;
  const char* name = nullptr;
  const char* text = nullptr;
  api.get_error_name(result, &name);
  api.get_error_string(result, &text);
  auto kind = result == kOutOfMemory ? ErrorKind::out_of_device_memory : ErrorKind::driver;
  if (std::find(std::begin(kLosesContext), std::end(kLosesContext), result) != std::end(kLosesContext)) {
    kind = ErrorKind::context_lost;
  }
  const Error error = Error::from_driver(kind, symbol, name != nullptr ? name : "CUDA error " + std::to_string(result),
                                         text != nullptr ? text : "");
  if (kind == ErrorKind::context_lost) {
    const Lock lock(mutex_);
    if (loss_.empty()) loss_ = error.what();
  }
  throw error;
}

CudaDevice::CudaDevice(const Calls& calls, int index) : calls_(calls) {
  calls_.check("cuDeviceGet", calls_.api.device_get(&ordinal_, index));
}

int CudaDevice::attribute(int which, int otherwise) const {
  int value = otherwise;
  return calls_.api.device_get_attribute(&value, which, ordinal_) == kSuccess ? value : otherwise;
}

Context CudaDevice::retained() {
  if (context_ == nullptr) {
    calls_.check("cuDevicePrimaryCtxRetain", calls_.api.primary_context_retain(&context_, ordinal_));
  }
  return context_;
}

AllocationProperties CudaDevice::properties() {
  const Lock lock(mutex_);
  if (properties_.type == 0) {
    if (attribute(kAttributeVirtualMemory, 0) == 0) {
      throw Error(ErrorKind::configuration, "the device does not support CUDA virtual memory management");
    }
    properties_.type = kAllocationPinned;
    properties_.location = {kLocationDevice, ordinal_};
    properties_.flags.gpu_direct_rdma_capable = attribute(kAttributeRdmaWithVirtualMemory, 0) != 0 ? 1 : 0;
  }
  return properties_;
}

EventHandle CudaDevice::idle_event() {
  const Lock lock(mutex_);
  if (idle_events_.empty()) return nullptr;
  const EventHandle event = idle_events_.back();
  idle_events_.pop_back();
  return event;
}

void CudaDevice::prepare(const KernelSource& source) noexcept {
  try {
    {
      const Lock lock(mutex_);
      if (kernels_[source.name].known()) return;
    }
    std::string code = compile(source);  // a quarter of a second, without the lock
    const Lock lock(mutex_);
    Kernels& kernels = kernels_[source.name];
    if (!kernels.known()) kernels.code = std::move(code);
  } catch (const std::exception&) {
    // has() tries again if it may, and warns.
  }
}

bool CudaDevice::has(const KernelSource& source, bool compile_now) noexcept {
  const Lock lock(mutex_);
  Kernels& kernels = kernels_[source.name];
  if (kernels.state == Kernels::State::unknown) {
    if (kernels.code.empty() && !compile_now) return false;
    try {
      load(source, kernels);
      kernels.state = Kernels::State::ready;
    } catch (const std::exception& error) {
      kernels.state = Kernels::State::missing;
      warn(std::string(source.without) + ": " + error.what());
    }
  }
  return kernels.state == Kernels::State::ready;
}

Function CudaDevice::kernel(const KernelSource& source, const char* name) {
  const Lock lock(mutex_);
  Kernels& kernels = kernels_[source.name];
  Function& function = kernels.functions[name];
  if (function == nullptr) {
    calls_.check("cuModuleGetFunction", calls_.api.module_get_function(&function, kernels.module, name));
  }
  return function;
}

void CudaDevice::load(const KernelSource& source, Kernels& kernels) {
  const BesideCaptures beside_captures(calls_.api);
  const CurrentContext current(calls_, retained());
  const std::string code = kernels.code.empty() ? compile(source) : std::move(kernels.code);
  calls_.check("cuModuleLoadData", calls_.api.module_load_data(&kernels.module, code.data()));
}

std::string CudaDevice::compile(const KernelSource& source) const {
  const std::string architecture = "sm_" + std::to_string(attribute(kAttributeComputeMajor, 0)) +
                                   std::to_string(attribute(kAttributeComputeMinor, 0));
  return cuda::compile(source.name, source.text, architecture);
}

}  // namespace memsaver::cuda
