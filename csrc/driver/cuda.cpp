#include "driver/cuda.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>

#include "driver/cuda_api.hpp"
#include "driver/cuda_device.hpp"
#include "driver/nvrtc.hpp"
#include "driver/packing_kernels.hpp"
#include "support/error.hpp"

namespace memsaver {

namespace {

using namespace cuda;

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
    check("cuDeviceGetCount", api_.device_get_count(&count));
    for (int i = 0; i < count; ++i) devices_.push_back(std::make_unique<CudaDevice>(calls_, i));
  }

  const char* name() const noexcept override { return "cuda"; }
  int device_count() override { return static_cast<int>(devices_.size()); }

  DeviceInfo device_info(int index) override {
    CudaDevice& device = at(index);
    DeviceInfo info{};
    char name[256] = {};
    check("cuDeviceGetName", api_.device_get_name(name, sizeof name, device.ordinal()));
    info.name = name;
    Uuid uuid{};
    check("cuDeviceGetUuid", api_.device_get_uuid(&uuid, device.ordinal()));
    info.uuid = "GPU-";
    for (int i = 0; i < 16; ++i) {
      char text[4];
      std::snprintf(text, sizeof text, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
      if (i == 4 || i == 6 || i == 8 || i == 10) info.uuid += '-';
      info.uuid += text;
    }
    check("cuDeviceTotalMem", api_.device_total_mem(&info.total_bytes, device.ordinal()));
    const auto properties = device.properties();
    check("cuMemGetAllocationGranularity",
          api_.mem_get_granularity(&info.granularity, &properties, kGranularityMinimum));
    info.numa_node = device.attribute(kAttributeHostNumaId, -1);
    info.rdma = properties.flags.gpu_direct_rdma_capable != 0;
    return info;
  }

  MemoryInfo memory_info(int index) override {
    MemoryInfo info{};
    call(index, "cuMemGetInfo", api_.mem_get_info, &info.free_bytes, &info.total_bytes);
    return info;
  }

  Address reserve(int index, std::size_t bytes) override {
    DevicePointer address = 0;
    call(index, "cuMemAddressReserve", api_.mem_address_reserve, &address, bytes, 0, 0, 0);
    return address;
  }
  void unreserve(int index, Address address, std::size_t bytes) override {
    call(index, "cuMemAddressFree", api_.mem_address_free, address, bytes);
  }

  Handle create(int index, std::size_t bytes) override { return create(index, bytes, 0); }
  void release(int index, Handle handle, std::size_t) override {
    call(index, "cuMemRelease", api_.mem_release, static_cast<MemHandle>(handle));
  }

  Handle create_exportable(int index, std::size_t bytes) override {
    return create(index, bytes, kHandleFileDescriptor);
  }
  int export_handle(int index, Handle handle) override {
    int file = -1;
    call(index, "cuMemExportToShareableHandle", api_.mem_export, &file, static_cast<MemHandle>(handle),
         kHandleFileDescriptor, 0);
    return file;
  }
  Handle import_handle(int index, int file, std::size_t) override {
    MemHandle handle = 0;
    auto* const descriptor = reinterpret_cast<void*>(static_cast<std::uintptr_t>(file));
    call(index, "cuMemImportFromShareableHandle", api_.mem_import, &handle, descriptor, kHandleFileDescriptor);
    return Handle{handle};
  }

  void map(int index, Address address, std::size_t bytes, Handle handle) override {
    call(index, "cuMemMap", api_.mem_map, address, bytes, 0, static_cast<MemHandle>(handle), 0);
  }
  void allow_access(int index, Address address, std::size_t bytes, const std::vector<int>& peers) override {
    const InContext in(at(index));
    std::vector<AccessDescriptor> access;
    access.push_back({{kLocationDevice, at(index).ordinal()}, kAccessReadWrite});
    for (const int peer : peers) {
      int reachable = 0;
      check("cuDeviceCanAccessPeer", api_.device_can_access_peer(&reachable, at(peer).ordinal(), at(index).ordinal()));
      if (reachable != 0) access.push_back({{kLocationDevice, at(peer).ordinal()}, kAccessReadWrite});
    }
    check("cuMemSetAccess", api_.mem_set_access(address, bytes, access.data(), access.size()));
  }
  void unmap(int index, Address address, std::size_t bytes) override {
    call(index, "cuMemUnmap", api_.mem_unmap, address, bytes);
  }

  void synchronize(int index) override { call(index, "cuCtxSynchronize", api_.context_synchronize); }

  void trim_graph_memory(int index) override {
    check("cuDeviceGraphMemTrim", api_.device_graph_mem_trim(at(index).ordinal()));
  }
  std::size_t graph_memory(int index) override {
    std::uint64_t bytes = 0;
    check("cuDeviceGetGraphMemAttribute",
          api_.device_get_graph_mem_attribute(at(index).ordinal(), kGraphMemReservedCurrent, &bytes));
    return bytes;
  }

  std::size_t stack_limit(int index) override {
    std::size_t bytes = 0;
    call(index, "cuCtxGetLimit", api_.context_get_limit, &bytes, kLimitStackSize);
    return bytes;
  }
  void set_stack_limit(int index, std::size_t bytes) override {
    call(index, "cuCtxSetLimit", api_.context_set_limit, kLimitStackSize, bytes);
  }

  Stream create_stream(int index) override {
    StreamHandle stream = nullptr;
    call(index, "cuStreamCreate", api_.stream_create, &stream, kStreamNonBlocking);
    return Stream{reinterpret_cast<std::uint64_t>(stream)};
  }
  void destroy_stream(int index, Stream stream) override {
    call(index, "cuStreamDestroy", api_.stream_destroy, native(stream));
  }

  void copy_to_host(int index, void* to, Address from, std::size_t bytes, Stream stream) override {
    call(index, "cuMemcpyDtoHAsync", api_.copy_to_host_async, to, from, bytes, native(stream));
  }
  void copy_to_device(int index, Address to, const void* from, std::size_t bytes, Stream stream) override {
    call(index, "cuMemcpyHtoDAsync", api_.copy_to_device_async, to, from, bytes, native(stream));
  }
  void fill_zero(int index, Address address, std::size_t bytes, Stream stream) override {
    call(index, "cuMemsetD8Async", api_.memset_async, address, 0, bytes, native(stream));
  }

  void digest(int index, const DigestKey& key, const DigestItem* items, std::size_t count, Digest* results,
              Stream stream) override {
    if (count == 0) return;
    if (!has_digest(index)) throw Error(ErrorKind::driver, "the digest kernel is not available on this device");
    const InContext in(at(index));
    DevicePointer device_items = in_device(items);
    DevicePointer device_results = in_device(results);
    DigestKey by_value = key;
    void* arguments[] = {&by_value, &device_items, &device_results};
    launch(index, kDigestSource, "memsaver_digest", count, kDigestThreads, arguments, stream);
  }
  void prepare_digest(int index) noexcept override { known(index).prepare(kDigestSource); }
  bool has_digest(int index) noexcept override { return known(index).has(kDigestSource, true); }

  void sample(int index, const PackItem* items, std::size_t count, ExponentSample* samples, Stream stream) override {
    if (count == 0) return;
    const InContext in(at(index));
    DevicePointer device_items = in_device(items);
    DevicePointer device_samples = in_device(samples);
    void* arguments[] = {&device_items, &device_samples};
    launch(index, kPackingSource, "memsaver_sample", count, kPackingThreads, arguments, stream);
  }
  void pack(int index, const PackPlan& plan, const PackItem& content, const PackItem& room, std::uint64_t* packed_bytes,
            Stream stream) override {
    *packed_bytes = 0;
    if (packed_bytes_without_escapes(content.bytes, plan.element_bytes) > room.bytes) return;
    const InContext in(at(index));
    check("cuMemsetD8Async", api_.memset_async(room.address, 0, sizeof(PackedHeader), native(stream)));
    PackPlan by_value = plan;
    auto [from, bytes] = content;
    auto [to, capacity] = room;
    DevicePointer result = in_device(packed_bytes);
    void* arguments[] = {&by_value, &from, &bytes, &to, &capacity, &result};
    const std::size_t blocks = blocks_for(bytes, plan.element_bytes);
    launch(index, kPackingSource, "memsaver_pack", blocks, kPackingThreads, arguments, stream);
    launch(index, kPackingSource, "memsaver_pack_finish", 1, 32, arguments, stream);
  }
  void unpack(int index, const PackItem& packed, const PackItem& content, std::uint64_t* damaged,
              Stream stream) override {
    if (packed.bytes < sizeof(PackedHeader)) {
      *damaged = 1;
      return;
    }
    const InContext in(at(index));
    auto [from, packed_bytes] = packed;
    auto [to, bytes] = content;
    DevicePointer result = in_device(damaged);
    void* arguments[] = {&from, &packed_bytes, &to, &bytes, &result};
    launch(index, kPackingSource, "memsaver_unpack", blocks_for(bytes, 2), kPackingThreads, arguments, stream);
  }
  void prepare_packing(int index) noexcept override { known(index).prepare(kPackingSource); }
  bool has_packing(int index) noexcept override { return known(index).has(kPackingSource, false); }
  void end() noexcept override { end_compiling(); }

  std::string loss() const override { return calls_.loss(); }
  // Device memory is read about seventy times as fast as PCIe 5 x16 copies it.
  bool digest_is_cheap() const noexcept override { return true; }

  Event record(int index, Stream stream) override {
    CudaDevice& device = at(index);
    const InContext in(device);
    EventHandle event = device.idle_event();
    if (event == nullptr) check("cuEventCreate", api_.event_create(&event, kEventDisableTiming));
    const Result recorded = api_.event_record(event, native(stream));
    if (recorded != kSuccess) device.recycle(event);
    check("cuEventRecord", recorded);
    return Event{reinterpret_cast<std::uint64_t>(event)};
  }
  bool done(int index, Event event) override {
    const InContext in(at(index));
    const Result result = api_.event_query(native(event));
    if (result == kNotReady) return false;
    check("cuEventQuery", result);
    return true;
  }
  void wait(int index, Event event) override {
    call(index, "cuEventSynchronize", api_.event_synchronize, native(event));
  }
  void recycle(int index, Event event) noexcept override { known(index).recycle(native(event)); }
  void stream_wait(int index, Stream stream, Event event) override {
    call(index, "cuStreamWaitEvent", api_.stream_wait_event, native(stream), native(event), 0);
  }

  void register_host(void* address, std::size_t bytes) override {
    const InContext in(first_used());
    const Result result = api_.host_register(address, bytes, kHostRegisterPortable | kHostRegisterDeviceMap);
    if (result == kOutOfMemory) {
      throw Error::from_driver(ErrorKind::out_of_host_memory, "cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY",
                               "host memory cannot be pinned")
          .with_bytes(bytes);
    }
    check("cuMemHostRegister", result);
  }
  void unregister_host(void* address) override {
    const InContext in(first_used());
    check("cuMemHostUnregister", api_.host_unregister(address));
  }

 private:
  void check(const char* symbol, Result result) const { calls_.check(symbol, result); }

  // Calls `function` of the driver in the context of a device.
  template <typename Function, typename... Arguments>
  void call(int index, const char* symbol, Function function, Arguments... arguments) {
    const InContext in(at(index));
    check(symbol, function(arguments...));
  }

  // The address of registered host memory for kernels.
  template <typename Value>
  DevicePointer in_device(const Value* host) {
    DevicePointer address = 0;
    check("cuMemHostGetDevicePointer", api_.host_get_device_pointer(&address, const_cast<Value*>(host), 0));
    return address;
  }
  // Thread blocks that pack or unpack so much content.
  static std::size_t blocks_for(std::size_t bytes, std::size_t element_bytes) {
    const std::size_t per_block = kPackedGroup * kPackingGroups * element_bytes;
    return std::max<std::size_t>(1, (bytes + per_block - 1) / per_block);
  }
  void launch(int index, const KernelSource& source, const char* kernel, std::size_t blocks, unsigned threads,
              void** arguments, Stream stream) {
    check("cuLaunchKernel", api_.launch_kernel(at(index).kernel(source, kernel), static_cast<unsigned>(blocks), 1, 1,
                                               threads, 1, 1, 0, native(stream), arguments, nullptr));
  }

  Handle create(int index, std::size_t bytes, int handle_types) {
    const InContext in(at(index));
    auto properties = at(index).properties();
    properties.requested_handle_types = handle_types;
    MemHandle handle = 0;
    check("cuMemCreate", api_.mem_create(&handle, bytes, &properties, 0));
    return Handle{handle};
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

  static StreamHandle native(Stream stream) {
    return reinterpret_cast<StreamHandle>(static_cast<std::uint64_t>(stream));
  }
  static EventHandle native(Event event) { return reinterpret_cast<EventHandle>(static_cast<std::uint64_t>(event)); }

  const Api& api_;
  const Calls calls_;
  std::vector<std::unique_ptr<CudaDevice>> devices_;
};

}  // namespace

bool cuda_available(std::string* why) noexcept { return cuda::api(why) != nullptr; }

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
