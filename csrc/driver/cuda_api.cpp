#include "driver/cuda_api.hpp"

#include <dlfcn.h>

#include <memory>
#include <mutex>

#include "support/error.hpp"

namespace memsaver::cuda {

namespace {

using GetProcAddress2 = Result (*)(const char*, void**, int, std::uint64_t, int*);
using GetProcAddress1 = Result (*)(const char*, void**, int, std::uint64_t);

// Throws Error if libcuda cannot be used.
void load(Api& api) {
  const auto missing = [](const std::string& why) { return Error(ErrorKind::configuration, why); };
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) throw missing("libcuda.so.1 cannot be opened: no NVIDIA driver is installed here");
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

}  // namespace

const Api* api(std::string* why) noexcept {
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
