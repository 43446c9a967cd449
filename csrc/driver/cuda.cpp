#include "driver/cuda.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <mutex>

#include "driver/cuda_api.hpp"
#include "driver/digest_kernel.hpp"
#include "driver/nvrtc.hpp"
#include "support/error.hpp"
#include "support/log.hpp"

namespace memsaver {

namespace {

using cuda::Api;
using cuda::Result;

// One device: its primary context and what we keep in it.
struct CudaDevice {
  std::mutex mutex;
  cuda::Device ordinal = 0;
  cuda::Context context = nullptr;
  cuda::AllocationProperties properties{};
  std::vector<cuda::EventHandle> idle_events;
  enum class DigestState { unknown, ready, missing } digest_state = DigestState::unknown;
  std::string digest_code;  // compiled and not loaded yet
  cuda::Function digest = nullptr;
};

class CudaDriver final : public Driver {
 public:
  CudaDriver() {
    std::string why;
    api_ = cuda::api(&why);
    if (api_ == nullptr) throw Error(ErrorKind::configuration, "the CUDA driver cannot be used: " + why);
    int count = 0;
    check("cuDeviceGetCount", api_->device_get_count(&count));
    for (int i = 0; i < count; ++i) {
      auto device = std::make_unique<CudaDevice>();
      check("cuDeviceGet", api_->device_get(&device->ordinal, i));
      devices_.push_back(std::move(device));
    }
  }

  const char* name() const noexcept override { return "cuda"; }
  int device_count() override { return static_cast<int>(devices_.size()); }

  DeviceInfo device_info(int index) override {
    CudaDevice& device = at(index);
    DeviceInfo info{};
    char name[256] = {};
    check("cuDeviceGetName", api_->device_get_name(name, sizeof name, device.ordinal));
    info.name = name;
    cuda::Uuid uuid{};
    check("cuDeviceGetUuid", api_->device_get_uuid(&uuid, device.ordinal));
    info.uuid = "GPU-";
    for (int i = 0; i < 16; ++i) {
      char text[4];
      std::snprintf(text, sizeof text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
      if (i == 4 || i == 6 || i == 8 || i == 10) info.uuid += '-';
      info.uuid += text;
    }
    check("cuDeviceTotalMem", api_->device_total_mem(&info.total_bytes, device.ordinal));
    const auto properties = properties_of(device);
    check("cuMemGetAllocationGranularity",
          api_->mem_get_granularity(&info.granularity, &properties, cuda::kGranularityMinimum));
    info.numa_node = attribute(device, cuda::kAttributeHostNumaId, -1);
    info.rdma = properties.flags.gpu_direct_rdma_capable != 0;
    return info;
  }

  MemoryInfo memory_info(int index) override {
    const InContext in(*this, index);
    MemoryInfo info{};
    check("cuMemGetInfo", api_->mem_get_info(&info.free_bytes, &info.total_bytes));
    return info;
  }

  Address reserve(int index, std::size_t bytes) override {
    const InContext in(*this, index);
    cuda::DevicePointer address = 0;
    check("cuMemAddressReserve", api_->mem_address_reserve(&address, bytes, 0, 0, 0));
    return address;
  }
  void unreserve(int index, Address address, std::size_t bytes) override {
    const InContext in(*this, index);
    check("cuMemAddressFree", api_->mem_address_free(address, bytes));
  }

  Handle create(int index, std::size_t bytes) override {
    const InContext in(*this, index);
    const auto properties = properties_of(at(index));
    cuda::MemHandle handle = 0;
    check("cuMemCreate", api_->mem_create(&handle, bytes, &properties, 0));
    return Handle{handle};
  }
  void release(int index, Handle handle, std::size_t) override {
    const InContext in(*this, index);
    check("cuMemRelease", api_->mem_release(static_cast<cuda::MemHandle>(handle)));
  }

  void map(int index, Address address, std::size_t bytes, Handle handle) override {
    const InContext in(*this, index);
    check("cuMemMap", api_->mem_map(address, bytes, 0, static_cast<cuda::MemHandle>(handle), 0));
  }
  void allow_access(int index, Address address, std::size_t bytes, const std::vector<int>& peers) override {
    const InContext in(*this, index);
    std::vector<cuda::AccessDescriptor> access;
    access.push_back({{cuda::kLocationDevice, at(index).ordinal}, cuda::kAccessReadWrite});
    for (const int peer : peers) {
      int reachable = 0;
      check("cuDeviceCanAccessPeer", api_->device_can_access_peer(&reachable, at(peer).ordinal, at(index).ordinal));
      if (reachable != 0) access.push_back({{cuda::kLocationDevice, at(peer).ordinal}, cuda::kAccessReadWrite});
    }
    check("cuMemSetAccess", api_->mem_set_access(address, bytes, access.data(), access.size()));
  }
  void unmap(int index, Address address, std::size_t bytes) override {
    const InContext in(*this, index);
    check("cuMemUnmap", api_->mem_unmap(address, bytes));
  }

  void synchronize(int index) override {
    const InContext in(*this, index);
    check("cuCtxSynchronize", api_->context_synchronize());
  }

  void trim_graph_memory(int index) override {
    check("cuDeviceGraphMemTrim", api_->device_graph_mem_trim(at(index).ordinal));
  }
  std::size_t graph_memory(int index) override {
    std::uint64_t bytes = 0;
    check("cuDeviceGetGraphMemAttribute",
          api_->device_get_graph_mem_attribute(at(index).ordinal, cuda::kGraphMemReservedCurrent, &bytes));
    return bytes;
  }

  Stream create_stream(int index) override {
    const InContext in(*this, index);
    cuda::StreamHandle stream = nullptr;
    check("cuStreamCreate", api_->stream_create(&stream, cuda::kStreamNonBlocking));
    return Stream{reinterpret_cast<std::uint64_t>(stream)};
  }
  void destroy_stream(int index, Stream stream) override {
    const InContext in(*this, index);
    check("cuStreamDestroy", api_->stream_destroy(native(stream)));
  }

  void copy_to_host(int index, void* to, Address from, std::size_t bytes, Stream stream) override {
    const InContext in(*this, index);
    check("cuMemcpyDtoHAsync", api_->copy_to_host_async(to, from, bytes, native(stream)));
  }
  void copy_to_device(int index, Address to, const void* from, std::size_t bytes, Stream stream) override {
    const InContext in(*this, index);
    check("cuMemcpyHtoDAsync", api_->copy_to_device_async(to, from, bytes, native(stream)));
  }
  void fill_zero(int index, Address address, std::size_t bytes, Stream stream) override {
    const InContext in(*this, index);
    check("cuMemsetD8Async", api_->memset_async(address, 0, bytes, native(stream)));
  }

  void digest(int index, const DigestKey& key, const DigestItem* items, std::size_t count, Digest* results,
              Stream stream) override {
    if (count == 0) return;
    if (!has_digest(index)) throw Error(ErrorKind::driver, "the digest kernel is not available on this device");
    const InContext in(*this, index);
    cuda::DevicePointer device_items = 0;
    cuda::DevicePointer device_results = 0;
    check("cuMemHostGetDevicePointer", api_->host_get_device_pointer(&device_items, const_cast<DigestItem*>(items), 0));
    check("cuMemHostGetDevicePointer", api_->host_get_device_pointer(&device_results, results, 0));
    DigestKey by_value = key;
    void* arguments[] = {&by_value, &device_items, &device_results};
    check("cuLaunchKernel", api_->launch_kernel(at(index).digest, static_cast<unsigned>(count), 1, 1,
                                                cuda::kDigestThreads, 1, 1, 0, native(stream), arguments, nullptr));
  }

  void prepare_digest(int index) noexcept override {
    CudaDevice& device = *devices_[static_cast<std::size_t>(index)];
    const auto known = [&device] {
      return device.digest_state != CudaDevice::DigestState::unknown || !device.digest_code.empty();
    };
    try {
      {
        const std::lock_guard<std::mutex> lock(device.mutex);
        if (known()) return;
      }
      std::string code = compile_digest(device);  // a quarter of a second, in which nobody shall wait for the device
      const std::lock_guard<std::mutex> lock(device.mutex);
      if (!known()) device.digest_code = std::move(code);
    } catch (const std::exception&) {
      // has_digest tries again, and says why it failed.
    }
  }
  bool has_digest(int index) noexcept override {
    CudaDevice& device = *devices_[static_cast<std::size_t>(index)];
    const std::lock_guard<std::mutex> lock(device.mutex);
    if (device.digest_state == CudaDevice::DigestState::unknown) {
      try {
        const InContext in(*this, index, lock);
        const std::string code = device.digest_code.empty() ? compile_digest(device) : std::move(device.digest_code);
        cuda::Module module = nullptr;
        check("cuModuleLoadData", api_->module_load_data(&module, code.data()));
        check("cuModuleGetFunction", api_->module_get_function(&device.digest, module, cuda::kDigestKernelName));
        device.digest_state = CudaDevice::DigestState::ready;
      } catch (const std::exception& error) {
        device.digest_state = CudaDevice::DigestState::missing;
        warn(std::string("content digests are off: every release copies everything, and nothing is verified: ") +
             error.what());
      }
    }
    return device.digest_state == CudaDevice::DigestState::ready;
  }
  std::string loss() const override {
    const std::lock_guard<std::mutex> lock(loss_mutex_);
    return loss_;
  }
  // Reading device memory is about seventy times as fast as copying it over PCIe 5 x16.
  bool digest_is_cheap() const noexcept override { return true; }

  Event record(int index, Stream stream) override {
    const InContext in(*this, index);
    CudaDevice& device = at(index);
    cuda::EventHandle event = nullptr;
    {
      const std::lock_guard<std::mutex> lock(device.mutex);
      if (!device.idle_events.empty()) {
        event = device.idle_events.back();
        device.idle_events.pop_back();
      }
    }
    if (event == nullptr) check("cuEventCreate", api_->event_create(&event, cuda::kEventDisableTiming));
    const Event result{reinterpret_cast<std::uint64_t>(event)};
    const Result recorded = api_->event_record(event, native(stream));
    if (recorded != cuda::kSuccess) {
      recycle(index, result);
      check("cuEventRecord", recorded);
    }
    return result;
  }
  bool done(int index, Event event) override {
    const InContext in(*this, index);
    const Result result = api_->event_query(native(event));
    if (result == cuda::kNotReady) return false;
    check("cuEventQuery", result);
    return true;
  }
  void wait(int index, Event event) override {
    const InContext in(*this, index);
    check("cuEventSynchronize", api_->event_synchronize(native(event)));
  }
  void recycle(int index, Event event) noexcept override {
    CudaDevice& device = *devices_[static_cast<std::size_t>(index)];
    const std::lock_guard<std::mutex> lock(device.mutex);
    device.idle_events.push_back(native(event));
  }
  void stream_wait(int index, Stream stream, Event event) override {
    const InContext in(*this, index);
    check("cuStreamWaitEvent", api_->stream_wait_event(native(stream), native(event), 0));
  }

  void register_host(void* address, std::size_t bytes) override {
    const InContext in(*this, first_used());
    const Result result =
        api_->host_register(address, bytes, cuda::kHostRegisterPortable | cuda::kHostRegisterDeviceMap);
    if (result == cuda::kOutOfMemory) {
      throw Error::from_driver(ErrorKind::out_of_host_memory, "cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY",
                               "host memory cannot be pinned")
          .with_bytes(bytes);
    }
    check("cuMemHostRegister", result);
  }
  void unregister_host(void* address) override {
    const InContext in(*this, first_used());
    check("cuMemHostUnregister", api_->host_unregister(address));
  }

 private:
  // A thread that calls what is no part of a graph, as registering host memory is, invalidates captures that other
  // threads have under way in their default mode, unless it says for a scope that it has nothing to do with them.
  class BesideCaptures {
   public:
    explicit BesideCaptures(const Api& api) : api_(api) { api_.exchange_capture_mode(&mode_); }
    BesideCaptures(const BesideCaptures&) = delete;
    BesideCaptures& operator=(const BesideCaptures&) = delete;
    ~BesideCaptures() { api_.exchange_capture_mode(&mode_); }

   private:
    const Api& api_;
    int mode_ = cuda::kCaptureModeRelaxed;
  };

  // Makes a device's context current for a scope, and the caller's own again after it.
  class InContext {
   public:
    InContext(CudaDriver& driver, int index) : api_(*driver.api_), beside_captures_(api_) {
      CudaDevice& device = driver.at(index);
      const std::lock_guard<std::mutex> lock(device.mutex);
      enter(driver, device);
    }
    InContext(CudaDriver& driver, int index, const std::lock_guard<std::mutex>&)
        : api_(*driver.api_), beside_captures_(api_) {
      enter(driver, driver.at(index));
    }
    InContext(const InContext&) = delete;
    InContext& operator=(const InContext&) = delete;
    ~InContext() {
      cuda::Context previous = nullptr;
      api_.context_pop(&previous);
    }

   private:
    void enter(CudaDriver& driver, CudaDevice& device) {
      if (device.context == nullptr) {
        driver.check("cuDevicePrimaryCtxRetain", api_.primary_context_retain(&device.context, device.ordinal));
      }
      driver.check("cuCtxPushCurrent", api_.context_push(device.context));
    }
    const Api& api_;
    const BesideCaptures beside_captures_;
  };

  void check(const char* symbol, Result result) const {
    if (result == cuda::kSuccess) return;
    try {
      cuda::fail(*api_, symbol, result);
    } catch (const Error& error) {
      if (error.kind == ErrorKind::context_lost) {
        const std::lock_guard<std::mutex> lock(loss_mutex_);
        if (loss_.empty()) loss_ = error.what();
      }
      throw;
    }
  }

  CudaDevice& at(int index) {
    if (index < 0 || index >= device_count()) {
      throw Error(ErrorKind::configuration, "there is no CUDA device " + std::to_string(index) + " (" +
                                                std::to_string(device_count()) + " visible)");
    }
    return *devices_[static_cast<std::size_t>(index)];
  }

  // Host memory is registered for all contexts at once (portable), so any context that exists will do.
  int first_used() {
    for (int i = 0; i < device_count(); ++i) {
      const std::lock_guard<std::mutex> lock(at(i).mutex);
      if (at(i).context != nullptr) return i;
    }
    return 0;
  }

  int attribute(const CudaDevice& device, int which, int otherwise) const {
    int value = otherwise;
    return api_->device_get_attribute(&value, which, device.ordinal) == cuda::kSuccess ? value : otherwise;
  }

  std::string compile_digest(const CudaDevice& device) const {
    const std::string architecture = "sm_" + std::to_string(attribute(device, cuda::kAttributeComputeMajor, 0)) +
                                     std::to_string(attribute(device, cuda::kAttributeComputeMinor, 0));
    return cuda::compile(cuda::kDigestKernelSource, architecture);
  }

  cuda::AllocationProperties properties_of(CudaDevice& device) const {
    const std::lock_guard<std::mutex> lock(device.mutex);
    if (device.properties.type == 0) {
      if (attribute(device, cuda::kAttributeVirtualMemory, 0) == 0) {
        throw Error(ErrorKind::configuration, "the device does not support CUDA virtual memory management");
      }
      device.properties.type = cuda::kAllocationPinned;
      device.properties.location = {cuda::kLocationDevice, device.ordinal};
      device.properties.flags.gpu_direct_rdma_capable =
          attribute(device, cuda::kAttributeRdmaWithVirtualMemory, 0) != 0 ? 1 : 0;
    }
    return device.properties;
  }

  static cuda::StreamHandle native(Stream stream) {
    return reinterpret_cast<cuda::StreamHandle>(static_cast<std::uint64_t>(stream));
  }
  static cuda::EventHandle native(Event event) {
    return reinterpret_cast<cuda::EventHandle>(static_cast<std::uint64_t>(event));
  }

  const Api* api_;
  std::vector<std::unique_ptr<CudaDevice>> devices_;
  mutable std::mutex loss_mutex_;
  mutable std::string loss_;
};

}  // namespace

bool cuda_available(std::string* why) noexcept { return cuda::api(why) != nullptr; }

bool cuda_can_checkpoint() noexcept {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return library != nullptr && dlsym(library, "cuCheckpointProcessCheckpoint") != nullptr;
}

bool cuda_reaches(int device, Address address) noexcept {
  const Api* const api = cuda::api(nullptr);
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
