#pragma once

#include <dlfcn.h>

#include <mutex>

#include "driver/driver.hpp"

// The part of CUDA's driver API that is used, declared here so that the build needs no CUDA toolkit. Types and values
// are those of cuda.h in CUDA 12 and 13, whose ABI is stable; tests/native compares them if cuda.h is installed.
namespace memsaver::cuda {

using Result = int;
using Device = int;
using DevicePointer = std::uint64_t;
using Context = struct ContextObject*;
using Module = struct ModuleObject*;
using Function = struct FunctionObject*;

struct Uuid {
  char bytes[16];
};

struct Location {
  int type;
  int id;
};

struct AllocationProperties {
  int type;
  int requested_handle_types;
  Location location;
  void* win32_handle_metadata;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};

struct AccessDescriptor {
  Location location;
  int flags;
};

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotReady = 600;

inline constexpr int kAllocationPinned = 1;            // CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int kHandleFileDescriptor = 1;        // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
inline constexpr int kLocationDevice = 1;              // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int kAccessReadWrite = 3;             // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
inline constexpr int kGranularityMinimum = 0;          // CU_MEM_ALLOC_GRANULARITY_MINIMUM
inline constexpr unsigned kStreamNonBlocking = 1;      // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kEventDisableTiming = 2;     // CU_EVENT_DISABLE_TIMING
inline constexpr unsigned kHostRegisterPortable = 1;   // CU_MEMHOSTREGISTER_PORTABLE
inline constexpr unsigned kHostRegisterDeviceMap = 2;  // CU_MEMHOSTREGISTER_DEVICEMAP
inline constexpr int kCaptureModeRelaxed = 2;          // CU_STREAM_CAPTURE_MODE_RELAXED

inline constexpr int kLimitStackSize = 0;           // CU_LIMIT_STACK_SIZE
inline constexpr int kGraphMemReservedCurrent = 2;  // CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
inline constexpr int kPointerAccessFlags = 16;      // CU_POINTER_ATTRIBUTE_ACCESS_FLAGS

inline constexpr int kAttributeComputeMajor = 75;
inline constexpr int kAttributeComputeMinor = 76;
inline constexpr int kAttributeVirtualMemory = 102;
inline constexpr int kAttributeRdmaWithVirtualMemory = 110;
inline constexpr int kAttributeHostNumaId = 134;

template <typename Signature>
struct EntryPoint;
template <typename... Parameters>
struct EntryPoint<Result(Parameters...)> {
  const char* symbol;
  Result (*function)(Parameters...) = nullptr;
  Result operator()(Parameters... arguments) const { return function(arguments...); }
};

// name, symbol, CUDA version of the variant that is used, arguments
#define MEMSAVER_CUDA_FUNCTIONS(X)                                                                                 \
  X(init, "cuInit", 2000, (unsigned))                                                                              \
  X(get_error_name, "cuGetErrorName", 6000, (Result, const char**))                                                \
  X(get_error_string, "cuGetErrorString", 6000, (Result, const char**))                                            \
  X(device_get_count, "cuDeviceGetCount", 2000, (int*))                                                            \
  X(device_get, "cuDeviceGet", 2000, (Device*, int))                                                               \
  X(device_get_name, "cuDeviceGetName", 2000, (char*, int, Device))                                                \
  X(device_get_uuid, "cuDeviceGetUuid", 11040, (Uuid*, Device))                                                    \
  X(device_get_attribute, "cuDeviceGetAttribute", 2000, (int*, int, Device))                                       \
  X(device_total_mem, "cuDeviceTotalMem", 3020, (std::size_t*, Device))                                            \
  X(device_graph_mem_trim, "cuDeviceGraphMemTrim", 11040, (Device))                                                \
  X(device_get_graph_mem_attribute, "cuDeviceGetGraphMemAttribute", 11040, (Device, int, void*))                   \
  X(device_can_access_peer, "cuDeviceCanAccessPeer", 4000, (int*, Device, Device))                                 \
  X(pointer_get_attribute, "cuPointerGetAttribute", 4000, (void*, int, DevicePointer))                             \
  X(primary_context_get_state, "cuDevicePrimaryCtxGetState", 7000, (Device, unsigned*, int*))                      \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", 7000, (Context*, Device))                                  \
  X(primary_context_release, "cuDevicePrimaryCtxRelease", 11000, (Device))                                         \
  X(context_push, "cuCtxPushCurrent", 4000, (Context))                                                             \
  X(context_pop, "cuCtxPopCurrent", 4000, (Context*))                                                              \
  X(context_synchronize, "cuCtxSynchronize", 2000, ())                                                             \
  X(context_get_limit, "cuCtxGetLimit", 3010, (std::size_t*, int))                                                 \
  X(context_set_limit, "cuCtxSetLimit", 3010, (int, std::size_t))                                                  \
  X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", 10010, (int*))                                     \
  X(mem_get_info, "cuMemGetInfo", 3020, (std::size_t*, std::size_t*))                                              \
  X(mem_get_granularity, "cuMemGetAllocationGranularity", 10020, (std::size_t*, const AllocationProperties*, int)) \
  X(mem_address_reserve, "cuMemAddressReserve", 10020,                                                             \
    (DevicePointer*, std::size_t, std::size_t, DevicePointer, unsigned long long))                                 \
  X(mem_address_free, "cuMemAddressFree", 10020, (DevicePointer, std::size_t))                                     \
  X(mem_create, "cuMemCreate", 10020, (Handle*, std::size_t, const AllocationProperties*, unsigned long long))     \
  X(mem_release, "cuMemRelease", 10020, (Handle))                                                                  \
  X(mem_export, "cuMemExportToShareableHandle", 10020, (void*, Handle, int, unsigned long long))                   \
  X(mem_import, "cuMemImportFromShareableHandle", 10020, (Handle*, void*, int))                                    \
  X(mem_map, "cuMemMap", 10020, (DevicePointer, std::size_t, std::size_t, Handle, unsigned long long))             \
  X(mem_unmap, "cuMemUnmap", 10020, (DevicePointer, std::size_t))                                                  \
  X(mem_set_access, "cuMemSetAccess", 10020, (DevicePointer, std::size_t, const AccessDescriptor*, std::size_t))   \
  X(copy_to_host_async, "cuMemcpyDtoHAsync", 3020, (void*, DevicePointer, std::size_t, Stream))                    \
  X(copy_to_device_async, "cuMemcpyHtoDAsync", 3020, (DevicePointer, const void*, std::size_t, Stream))            \
  X(copy_on_device_async, "cuMemcpyDtoDAsync", 3020, (DevicePointer, DevicePointer, std::size_t, Stream))          \
  X(memset_async, "cuMemsetD8Async", 3020, (DevicePointer, unsigned char, std::size_t, Stream))                    \
  X(stream_create, "cuStreamCreate", 2000, (Stream*, unsigned))                                                    \
  X(stream_destroy, "cuStreamDestroy", 4000, (Stream))                                                             \
  X(stream_wait_event, "cuStreamWaitEvent", 3020, (Stream, Event, unsigned))                                       \
  X(event_create, "cuEventCreate", 2000, (Event*, unsigned))                                                       \
  X(event_record, "cuEventRecord", 2000, (Event, Stream))                                                          \
  X(event_query, "cuEventQuery", 2000, (Event))                                                                    \
  X(event_synchronize, "cuEventSynchronize", 2000, (Event))                                                        \
  X(host_register, "cuMemHostRegister", 6050, (void*, std::size_t, unsigned))                                      \
  X(host_unregister, "cuMemHostUnregister", 4000, (void*))                                                         \
  X(host_get_device_pointer, "cuMemHostGetDevicePointer", 3020, (DevicePointer*, void*, unsigned))                 \
  X(module_load_data, "cuModuleLoadData", 2000, (Module*, const void*))                                            \
  X(module_get_function, "cuModuleGetFunction", 2000, (Function*, Module, const char*))                            \
  X(launch_kernel, "cuLaunchKernel", 4000,                                                                         \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Stream, void**, void**))

// Functions of libcuda.so.1, opened at run time.
struct Api {
#define MEMSAVER_DECLARE(name, symbol, version, arguments) EntryPoint<Result arguments> name{symbol};
  MEMSAVER_CUDA_FUNCTIONS(MEMSAVER_DECLARE)
#undef MEMSAVER_DECLARE
};

// Throws configuration if libcuda, a device or a required function is missing: `api` must not be used.
inline void load(Api& api) {
  const auto missing = [](const std::string& why) { return Error(ErrorKind::configuration, why); };
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw missing("libcuda.so.1 cannot be opened: no NVIDIA driver is installed here");
  using GetProcAddress2 = Result (*)(const char*, void**, int, std::uint64_t, int*);
  using GetProcAddress1 = Result (*)(const char*, void**, int, std::uint64_t);
  const auto get2 = reinterpret_cast<GetProcAddress2>(dlsym(library, "cuGetProcAddress_v2"));
  const auto get1 = reinterpret_cast<GetProcAddress1>(dlsym(library, "cuGetProcAddress"));
  const auto find = [&](const char* symbol, int version) -> void* {
    void* function = nullptr;
    int status = 0;
    const Result result = get2 != nullptr   ? get2(symbol, &function, version, 0, &status)
                          : get1 != nullptr ? get1(symbol, &function, version, 0)
                                            : 1;
    return result == kSuccess ? function : nullptr;
  };
#define MEMSAVER_LOAD(name, symbol, version, arguments)                                     \
  api.name.function = reinterpret_cast<decltype(api.name.function)>(find(symbol, version)); \
  if (api.name.function == nullptr)                                                         \
    throw missing("the NVIDIA driver has no " symbol ": it is too old, CUDA 11.4 or later is needed");
  MEMSAVER_CUDA_FUNCTIONS(MEMSAVER_LOAD)
#undef MEMSAVER_LOAD
  const Result result = api.init(0);
  if (result != kSuccess) {
    const char* name = nullptr;
    api.get_error_name(result, &name);
    throw missing(std::string("cuInit failed: ") + (name != nullptr ? name : "unknown error"));
  }
  int count = 0;
  if (api.device_get_count(&count) != kSuccess || count == 0) throw missing("the NVIDIA driver finds no device");
}

// Returns the API; null, with the reason in `why`, if libcuda, a device or a required function is missing.
[[nodiscard]] inline const Api* api(std::string* why) noexcept {
  static std::once_flag once;
  static Api* loaded = nullptr;
  static auto* reason = new std::string;
  std::call_once(once, [] {
    try {
      auto candidate = std::make_unique<Api>();
      load(*candidate);
      loaded = candidate.release();
    } catch (const std::exception& error) {
      *reason = error.what();
    }
  });
  if (loaded == nullptr && why != nullptr) *why = *reason;
  return loaded;
}

}  // namespace memsaver::cuda
