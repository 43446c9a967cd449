#include "driver/cuda_api.hpp"

#include <dlfcn.h>

#include <mutex>

#include "support/error.hpp"

namespace memsaver::cuda {

namespace {

using GetProcAddress2 = Result (*)(const char*, void**, int, std::uint64_t, int*);
using GetProcAddress1 = Result (*)(const char*, void**, int, std::uint64_t);

bool load(Api& api, std::string& why) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    why = "libcuda.so.1 cannot be opened: no NVIDIA driver is installed here";
    return false;
  }
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
#define MEMSAVER_LOAD(name, symbol, version, arguments)                                                          \
  api.name = reinterpret_cast<decltype(api.name)>(find(symbol, version));                                        \
  if (api.name == nullptr) {                                                                                     \
    why = std::string("the NVIDIA driver has no ") + (symbol) + ": it is too old, CUDA 11.4 or later is needed"; \
    return false;                                                                                                \
  }
  MEMSAVER_CUDA_FUNCTIONS(MEMSAVER_LOAD)
#undef MEMSAVER_LOAD
  const Result result = api.init(0);
  if (result != kSuccess) {
    const char* name = nullptr;
    api.get_error_name(result, &name);
    why = std::string("cuInit failed: ") + (name != nullptr ? name : "unknown error");
    return false;
  }
  int count = 0;
  if (api.device_get_count(&count) != kSuccess || count == 0) {
    why = "the NVIDIA driver finds no device";
    return false;
  }
  return true;
}

// After these errors the context is unusable for the rest of the process (cuda.h: "leaves the process in an
// inconsistent state", or a hardware fault).
bool loses_context(Result result) {
  switch (result) {
    case 214:  // ECC_UNCORRECTABLE
    case 220:  // NVLINK_UNCORRECTABLE
    case 226:  // CONTAINED
    case 700:  // ILLEGAL_ADDRESS
    case 702:  // LAUNCH_TIMEOUT
    case 709:  // CONTEXT_IS_DESTROYED
    case 710:  // ASSERT
    case 714:  // HARDWARE_STACK_ERROR
    case 715:  // ILLEGAL_INSTRUCTION
    case 716:  // MISALIGNED_ADDRESS
    case 717:  // INVALID_ADDRESS_SPACE
    case 718:  // INVALID_PC
    case 719:  // LAUNCH_FAILED
    case 721:  // TENSOR_MEMORY_LEAK
      return true;
    default:
      return false;
  }
}

}  // namespace

const Api* api(std::string* why) noexcept {
  static std::once_flag once;
  static Api* loaded = nullptr;
  static auto* reason = new std::string;
  std::call_once(once, [] {
    auto* candidate = new Api;
    try {
      if (load(*candidate, *reason)) loaded = candidate;
    } catch (const std::exception& error) {
      *reason = error.what();
    }
    if (loaded == nullptr) delete candidate;
  });
  if (loaded == nullptr && why != nullptr) *why = *reason;
  return loaded;
}

void fail(const Api& api, const char* symbol, Result result) {
  const char* name = nullptr;
  const char* text = nullptr;
  api.get_error_name(result, &name);
  api.get_error_string(result, &text);
  ErrorKind kind = ErrorKind::driver;
  if (result == kOutOfMemory) kind = ErrorKind::out_of_device_memory;
  if (loses_context(result)) kind = ErrorKind::context_lost;
  throw Error::from_driver(kind, symbol, name != nullptr ? name : "CUDA error " + std::to_string(result),
                           text != nullptr ? text : "");
}

}  // namespace memsaver::cuda
