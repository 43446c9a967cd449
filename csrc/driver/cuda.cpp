#include <algorithm>
#include <iterator>
#include <map>

#include "driver/cuda_api.hpp"
#include "driver/driver.hpp"
#include "driver/nvml.hpp"
#include "driver/nvrtc.hpp"
#include "driver/packing_kernels.hpp"
#include "support/log.hpp"
#include "support/mutex.hpp"

namespace memsaver {

namespace {

using namespace cuda;

// After these errors the context is unusable (cuda.h: "leaves the process in an inconsistent state", or a hardware
// fault): ECC_UNCORRECTABLE, NVLINK_UNCORRECTABLE, CONTAINED; ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, CONTEXT_IS_DESTROYED,
// ASSERT, HARDWARE_STACK_ERROR, ILLEGAL_INSTRUCTION, MISALIGNED_ADDRESS, INVALID_ADDRESS_SPACE, INVALID_PC,
// LAUNCH_FAILED, TENSOR_MEMORY_LEAK.
constexpr Result kLosesContext[] = {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721};

// The digest of support/digest.hpp, one thread block per item. Eight 16-byte loads in flight per thread saturate the
// memory and hide the arithmetic (two 64 x 64 -> 128 products a word). __ldcs keeps the engine's lines in the cache.
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

// Kernels that are compiled together at run time.
struct KernelSource {
  const char* name;     // of the set
  const char* text;     // CUDA C++
  const char* without;  // the consequence if they are missing
};
constexpr unsigned kDigestThreads = 256;
const KernelSource kDigestSource{"digest", kDigestKernel,
                                 "content digests are off: every release copies everything, and nothing is verified"};
const KernelSource kPackingSource{"packing", kPackingKernels, "content is kept as it is, not packed"};

// Calls the driver, and owns the message of the first failure that lost the context. Any thread may use it.
class Calls {
 public:
  explicit Calls(const Api& driver_api) : api(driver_api) {}

  // Calls a function. Throws driver errors.
  template <typename... Parameters, typename... Arguments>
  void operator()(const EntryPoint<Result(Parameters...)>& function, Arguments... arguments) const {
    check(function.symbol, function(arguments...));
  }

  // Throws driver errors if `result`, of a call of `symbol`, is a failure.
  void check(const char* symbol, Result result) const {
    if (result == kSuccess) return;
    const char* name = nullptr;
    const char* text = nullptr;
    api.get_error_name(result, &name);
    api.get_error_string(result, &text);
    auto kind = result == kOutOfMemory ? ErrorKind::out_of_device_memory : ErrorKind::driver;
    if (std::find(std::begin(kLosesContext), std::end(kLosesContext), result) != std::end(kLosesContext)) {
      kind = ErrorKind::context_lost;
    }
    const Error error = Error::from_driver(
        kind, symbol, name != nullptr ? name : "CUDA error " + std::to_string(result), text != nullptr ? text : "");
    if (kind == ErrorKind::context_lost) {
      const Lock lock(mutex_);
      if (loss_.empty()) loss_ = error.what();
    }
    throw error;
  }

  [[nodiscard]] std::string loss() const {
    const Lock lock(mutex_);
    return loss_;
  }

  const Api& api;

 private:
  mutable Mutex mutex_;
  mutable std::string loss_ GUARDED_BY(mutex_);
};

// Owns one device's primary context, and what this process keeps in it. Any thread may call any function.
class CudaDevice {
 public:
  CudaDevice(const Calls& calls, int index) : calls_(calls) { calls_(calls_.api.device_get, &ordinal_, index); }

  [[nodiscard]] Device ordinal() const { return ordinal_; }
  [[nodiscard]] int attribute(int which, int otherwise) const {
    int value = otherwise;
    return calls_.api.device_get_attribute(&value, which, ordinal_) == kSuccess ? value : otherwise;
  }
  // Returns the primary context, retained at the first call.
  [[nodiscard]] Context context() {
    const Lock lock(context_mutex_);
    if (context_ == nullptr) calls_(calls_.api.primary_context_retain, &context_, ordinal_);
    return context_;
  }
  [[nodiscard]] bool has_context() {
    const Lock lock(context_mutex_);
    return context_ != nullptr;
  }

  // Makes the device's context current for a scope; the caller's is current again afterwards. Stream captures of other
  // threads stay valid: a call that cannot be part of a graph, such as registering host memory, invalidates them unless
  // the calling thread is in relaxed capture mode.
  class InContext {
   public:
    explicit InContext(CudaDevice& device) : api_(device.calls_.api) {
      api_.exchange_capture_mode(&mode_);
      try {
        device.calls_(api_.context_push, device.context());
      } catch (...) {
        api_.exchange_capture_mode(&mode_);
        throw;
      }
    }
    InContext(const InContext&) = delete;
    ~InContext() {
      Context previous = nullptr;
      api_.context_pop(&previous);
      api_.exchange_capture_mode(&mode_);
    }

   private:
    const Api& api_;
    int mode_ = kCaptureModeRelaxed;
  };

  // Returns the properties of memory to create. Throws configuration if the device has no virtual memory management.
  // Asks the driver once: each chunk that is created has them.
  [[nodiscard]] AllocationProperties properties() {
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

  // Returns an event that recycle() took back, or Event{}.
  [[nodiscard]] Event idle_event() {
    const Lock lock(mutex_);
    if (idle_events_.empty()) return Event{};
    const Event event = idle_events_.back();
    idle_events_.pop_back();
    return event;
  }
  void recycle(Event event) {
    const Lock lock(mutex_);
    idle_events_.push_back(event);
  }

  // Compiles kernels unless that was done before, without using the device.
  void prepare(const KernelSource& source) noexcept {
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
      // has() compiles again if that is allowed, and warns if that fails, too.
    }
  }

  // Returns whether kernel() works. Loads what prepare() compiled; compiles it only if `compile_now`.
  [[nodiscard]] bool has(const KernelSource& source, bool compile_now) noexcept {
    const Lock lock(mutex_);
    Kernels& kernels = kernels_[source.name];
    if (kernels.module == nullptr && !kernels.failed && (compile_now || !kernels.code.empty())) {
      try {
        load(source, kernels);
      } catch (const std::exception& error) {
        kernels.failed = true;
        warn(std::string(source.without) + ": " + error.what());
      }
    }
    return kernels.module != nullptr && !kernels.failed;
  }

  // Returns a kernel of the set. Only after has() returned true. Throws driver errors.
  [[nodiscard]] Function kernel(const KernelSource& source, const char* name) {
    const Lock lock(mutex_);
    Kernels& kernels = kernels_[source.name];
    Function& function = kernels.functions[name];
    if (function == nullptr) calls_(calls_.api.module_get_function, &function, kernels.module, name);
    return function;
  }

 private:
  struct Kernels {
    std::string code;  // compiled, and not loaded yet
    Module module = nullptr;
    bool failed = false;  // to compile or load
    std::map<std::string, Function> functions;
    [[nodiscard]] bool known() const { return failed || module != nullptr || !code.empty(); }
  };

  void load(const KernelSource& source, Kernels& kernels) REQUIRES(mutex_) {
    const InContext in(*this);
    const std::string code = kernels.code.empty() ? compile(source) : std::move(kernels.code);
    calls_(calls_.api.module_load_data, &kernels.module, code.data());
  }
  [[nodiscard]] std::string compile(const KernelSource& source) const {
    const std::string architecture = "sm_" + std::to_string(attribute(kAttributeComputeMajor, 0)) +
                                     std::to_string(attribute(kAttributeComputeMinor, 0));
    return cuda::compile(source.name, source.text, architecture);
  }

  const Calls& calls_;
  Device ordinal_ = 0;
  Mutex context_mutex_;
  Context context_ GUARDED_BY(context_mutex_) = nullptr;
  Mutex mutex_ ACQUIRED_BEFORE(context_mutex_);
  std::vector<Event> idle_events_ GUARDED_BY(mutex_);
  AllocationProperties properties_ GUARDED_BY(mutex_){};
  std::map<const char*, Kernels> kernels_ GUARDED_BY(mutex_);  // by name of the set
};

using InContext = CudaDevice::InContext;

const Api& require_api() {
  std::string why;
  const Api* const api = cuda::api(&why);
  if (api == nullptr) throw Error(ErrorKind::configuration, "the CUDA driver cannot be used: " + why);
  return *api;
}

class CudaDriver final : public Driver {
 public:
  CudaDriver() : api_(require_api()), calls_(api_) {
    int count = 0;
    calls_(api_.device_get_count, &count);
    for (int i = 0; i < count; ++i) devices_.push_back(std::make_unique<CudaDevice>(calls_, i));
  }

  int device_count() override { return static_cast<int>(devices_.size()); }

  DeviceInfo device_info(int index) override {
    CudaDevice& device = at(index);
    DeviceInfo info{};
    char name[256] = {};
    calls_(api_.device_get_name, name, sizeof name, device.ordinal());
    info.name = name;
    Uuid uuid{};
    calls_(api_.device_get_uuid, &uuid, device.ordinal());
    info.uuid = "GPU-";
    for (int i = 0; i < 16; ++i) {
      char text[4];
      std::snprintf(text, sizeof text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
      if (i == 4 || i == 6 || i == 8 || i == 10) info.uuid += '-';
      info.uuid += text;
    }
    calls_(api_.device_total_mem, &info.total_bytes, device.ordinal());
    const auto properties = device.properties();
    calls_(api_.mem_get_granularity, &info.granularity, &properties, kGranularityMinimum);
    info.numa_node = device.attribute(kAttributeHostNumaId, -1);
    return info;
  }

  bool links_directly(int index, const std::string& uuid) override {
    return nvml::nvlink_connects(device_info(index).uuid, uuid);
  }
  MemoryInfo memory_info(int index) override {
    MemoryInfo info{};
    call(index, api_.mem_get_info, &info.free_bytes, &info.total_bytes);
    return info;
  }

  Address reserve(int index, std::size_t bytes) override {
    DevicePointer address = 0;
    call(index, api_.mem_address_reserve, &address, bytes, 0, 0, 0);
    return address;
  }
  void unreserve(int index, Address address, std::size_t bytes) override {
    call(index, api_.mem_address_free, address, bytes);
  }

  Handle create(int index, std::size_t bytes, bool exportable) override {
    const InContext in(at(index));
    auto properties = at(index).properties();
    properties.requested_handle_types = exportable ? kHandleFileDescriptor : 0;
    Handle handle{};
    calls_(api_.mem_create, &handle, bytes, &properties, 0);
    return handle;
  }
  void release(int index, Handle handle, std::size_t) override { call(index, api_.mem_release, handle); }

  int export_handle(int index, Handle handle) override {
    int file = -1;
    call(index, api_.mem_export, &file, handle, kHandleFileDescriptor, 0);
    return file;
  }
  Handle import_handle(int index, int file, std::size_t) override {
    Handle handle{};
    auto* const descriptor = reinterpret_cast<void*>(static_cast<std::uintptr_t>(file));
    call(index, api_.mem_import, &handle, descriptor, kHandleFileDescriptor);
    return handle;
  }

  void map(int index, Address address, std::size_t bytes, Handle handle) override {
    call(index, api_.mem_map, address, bytes, 0, handle, 0);
  }
  void allow_access(int index, Address address, std::size_t bytes, const std::vector<int>& peers) override {
    const InContext in(at(index));
    std::vector<AccessDescriptor> access;
    access.push_back({{kLocationDevice, at(index).ordinal()}, kAccessReadWrite});
    for (const int peer : peers) {
      int reachable = 0;
      calls_(api_.device_can_access_peer, &reachable, at(peer).ordinal(), at(index).ordinal());
      if (reachable != 0) access.push_back({{kLocationDevice, at(peer).ordinal()}, kAccessReadWrite});
    }
    calls_(api_.mem_set_access, address, bytes, access.data(), access.size());
  }
  void unmap(int index, Address address, std::size_t bytes) override { call(index, api_.mem_unmap, address, bytes); }

  void synchronize(int index) override { call(index, api_.context_synchronize); }

  void trim_graph_memory(int index) override { calls_(api_.device_graph_mem_trim, at(index).ordinal()); }
  std::size_t graph_memory(int index) override {
    std::uint64_t bytes = 0;
    calls_(api_.device_get_graph_mem_attribute, at(index).ordinal(), kGraphMemReservedCurrent, &bytes);
    return bytes;
  }

  std::size_t stack_limit(int index) override {
    std::size_t bytes = 0;
    call(index, api_.context_get_limit, &bytes, kLimitStackSize);
    return bytes;
  }
  void set_stack_limit(int index, std::size_t bytes) override {
    call(index, api_.context_set_limit, kLimitStackSize, bytes);
  }

  Stream create_stream(int index) override {
    Stream stream{};
    call(index, api_.stream_create, &stream, kStreamNonBlocking);
    return stream;
  }
  void destroy_stream(int index, Stream stream) override { call(index, api_.stream_destroy, stream); }

  void copy_to_host(int index, void* to, Address from, std::size_t bytes, Stream stream) override {
    call(index, api_.copy_to_host_async, to, from, bytes, stream);
  }
  void copy_to_device(int index, Address to, const void* from, std::size_t bytes, Stream stream) override {
    call(index, api_.copy_to_device_async, to, from, bytes, stream);
  }
  void copy_on_device(int index, Address to, Address from, std::size_t bytes, Stream stream) override {
    call(index, api_.copy_on_device_async, to, from, bytes, stream);
  }
  void fill_zero(int index, Address address, std::size_t bytes, Stream stream) override {
    call(index, api_.memset_async, address, 0, bytes, stream);
  }

  void digest(int index, const DigestKey& key, const DigestItem* items, std::size_t count, Digest* results,
              Stream stream) override {
    if (count == 0) return;
    if (!has_digest(index)) throw Error(ErrorKind::driver, "the digest kernel is not available on this device");
    const InContext in(at(index));
    launch(index, kDigestSource, "memsaver_digest", count, kDigestThreads, stream, key, in_device(items),
           in_device(results));
  }
  void prepare_digest(int index) noexcept override { known(index).prepare(kDigestSource); }
  bool has_digest(int index) noexcept override { return known(index).has(kDigestSource, true); }

  void sample(int index, const PackItem* items, std::size_t count, ExponentSample* samples, Stream stream) override {
    if (count == 0) return;
    const InContext in(at(index));
    launch(index, kPackingSource, "memsaver_sample", count, kPackingThreads, stream, in_device(items),
           in_device(samples));
  }
  void pack(int index, const PackPlan& plan, const PackItem& content, const PackItem& room, std::uint64_t* packed_bytes,
            Stream stream) override {
    *packed_bytes = 0;
    if (packed_bytes_without_escapes(content.bytes, plan.element_bytes) > room.bytes) return;
    const InContext in(at(index));
    calls_(api_.memset_async, room.address, 0, sizeof(PackedHeader), stream);
    launch(index, kPackingSource, "memsaver_pack", blocks_for(content.bytes, plan.element_bytes), kPackingThreads,
           stream, plan, content.address, content.bytes, room.address, room.bytes);
    launch(index, kPackingSource, "memsaver_pack_finish", 1, 32, stream, plan, content.address, content.bytes,
           room.address, room.bytes, in_device(packed_bytes));
  }
  void unpack(int index, const PackItem& packed, const PackItem& content, std::uint64_t* damaged,
              Stream stream) override {
    if (packed.bytes < sizeof(PackedHeader)) {
      *damaged = 1;
      return;
    }
    const InContext in(at(index));
    launch(index, kPackingSource, "memsaver_unpack", blocks_for(content.bytes, 2), kPackingThreads, stream,
           packed.address, packed.bytes, content.address, content.bytes, in_device(damaged));
  }
  void prepare_packing(int index) noexcept override { known(index).prepare(kPackingSource); }
  bool has_packing(int index) noexcept override { return known(index).has(kPackingSource, false); }
  void end() noexcept override { end_compiling(); }

  std::string loss() const override { return calls_.loss(); }

  Event record(int index, Stream stream) override {
    CudaDevice& device = at(index);
    const InContext in(device);
    Event event = device.idle_event();
    if (event == Event{}) calls_(api_.event_create, &event, kEventDisableTiming);
    const Result recorded = api_.event_record(event, stream);
    if (recorded != kSuccess) device.recycle(event);
    calls_.check("cuEventRecord", recorded);
    return event;
  }
  bool done(int index, Event event) override {
    const InContext in(at(index));
    const Result result = api_.event_query(event);
    if (result == kNotReady) return false;
    calls_.check("cuEventQuery", result);
    return true;
  }
  void wait(int index, Event event) override { call(index, api_.event_synchronize, event); }
  void recycle(int index, Event event) noexcept override { known(index).recycle(event); }
  void stream_wait(int index, Stream stream, Event event) override {
    call(index, api_.stream_wait_event, stream, event, 0);
  }

  void register_host(void* address, std::size_t bytes) override {
    const InContext in(first_used());
    const Result result = api_.host_register(address, bytes, kHostRegisterPortable | kHostRegisterDeviceMap);
    if (result == kOutOfMemory) {
      throw Error::from_driver(ErrorKind::out_of_host_memory, "cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY",
                               "host memory cannot be pinned")
          .with_bytes(bytes);
    }
    calls_.check("cuMemHostRegister", result);
  }
  void unregister_host(void* address) override {
    const InContext in(first_used());
    calls_(api_.host_unregister, address);
  }

 private:
  // Calls a function of the driver in the context of a device.
  template <typename... Parameters, typename... Arguments>
  void call(int index, const EntryPoint<Result(Parameters...)>& function, Arguments... arguments) {
    const InContext in(at(index));
    calls_(function, arguments...);
  }

  // Returns the address of registered host memory for kernels.
  template <typename Value>
  DevicePointer in_device(const Value* host) {
    DevicePointer address = 0;
    calls_(api_.host_get_device_pointer, &address, const_cast<Value*>(host), 0);
    return address;
  }
  // Returns how many thread blocks pack or unpack this content.
  static std::size_t blocks_for(std::size_t bytes, std::size_t element_bytes) {
    const std::size_t per_block = kPackedGroup * kPackingGroups * element_bytes;
    return std::max<std::size_t>(1, (bytes + per_block - 1) / per_block);
  }
  // Each argument must be of the type of the kernel's parameter.
  template <typename... Arguments>
  void launch(int index, const KernelSource& source, const char* kernel, std::size_t blocks, unsigned threads,
              Stream stream, Arguments... arguments) {
    void* pointers[] = {&arguments...};
    calls_(api_.launch_kernel, at(index).kernel(source, kernel), static_cast<unsigned>(blocks), 1, 1, threads, 1, 1, 0,
           stream, pointers, nullptr);
  }

  CudaDevice& at(int index) {
    if (index < 0 || index >= device_count()) {
      throw Error(ErrorKind::configuration, "there is no CUDA device " + std::to_string(index) + " (" +
                                                std::to_string(device_count()) + " visible)");
    }
    return *devices_[static_cast<std::size_t>(index)];
  }
  // For functions that must not throw.
  CudaDevice& known(int index) noexcept { return *devices_[static_cast<std::size_t>(index)]; }

  // Host memory is registered for all contexts at once (portable), so any context will do.
  CudaDevice& first_used() {
    for (const auto& device : devices_) {
      if (device->has_context()) return *device;
    }
    return at(0);
  }

  const Api& api_;
  const Calls calls_;
  std::vector<std::unique_ptr<CudaDevice>> devices_;
};

}  // namespace

std::string cuda_missing() {
  std::string why;
  (void)cuda::api(&why);
  return why;
}

bool cuda_can_checkpoint() noexcept {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return library != nullptr && dlsym(library, "cuCheckpointProcessCheckpoint") != nullptr;
}

bool cuda_reaches(int device, Address address) noexcept {
  const cuda::Api* const api = cuda::api(nullptr);
  cuda::Device ordinal = 0;
  cuda::Context context = nullptr;
  if (api == nullptr || api->device_get(&ordinal, device) != cuda::kSuccess) return false;
  unsigned flags = 0;
  int active = 0;
  if (api->primary_context_get_state(ordinal, &flags, &active) != cuda::kSuccess || active == 0) return false;
  if (api->primary_context_retain(&context, ordinal) != cuda::kSuccess) return false;
  int access = 0;
  if (api->context_push(context) == cuda::kSuccess) {
    if (api->pointer_get_attribute(&access, cuda::kPointerAccessFlags, address) != cuda::kSuccess) access = 0;
    api->context_pop(&context);
  }
  api->primary_context_release(ordinal);
  return access != 0;
}

std::unique_ptr<Driver> open_cuda_driver() { return std::make_unique<CudaDriver>(); }

}  // namespace memsaver
