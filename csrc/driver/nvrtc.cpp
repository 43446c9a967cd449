#include "driver/nvrtc.hpp"

#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "support/error.hpp"
#include "support/mutex.hpp"

namespace memsaver::cuda {

namespace {

// Held while NVRTC works. A process that ended meanwhile would crash: its exit handlers free what NVRTC uses.
Mutex compiling;
bool ended GUARDED_BY(compiling) = false;
std::string& torch_path GUARDED_BY(compiling) = *new std::string;

// name, symbol, arguments
#define MEMSAVER_NVRTC_FUNCTIONS(X)                                                                                \
  X(version, "nvrtcVersion", (int*, int*))                                                                         \
  X(create, "nvrtcCreateProgram", (void**, const char*, const char*, int, const char* const*, const char* const*)) \
  X(compile, "nvrtcCompileProgram", (void*, int, const char* const*))                                              \
  X(cubin_size, "nvrtcGetCUBINSize", (void*, std::size_t*))                                                        \
  X(cubin, "nvrtcGetCUBIN", (void*, char*))                                                                        \
  X(log_size, "nvrtcGetProgramLogSize", (void*, std::size_t*))                                                     \
  X(log, "nvrtcGetProgramLog", (void*, char*))                                                                     \
  X(destroy, "nvrtcDestroyProgram", (void**))

struct Nvrtc {
#define MEMSAVER_DECLARE(name, symbol, arguments) int(*name) arguments;
  MEMSAVER_NVRTC_FUNCTIONS(MEMSAVER_DECLARE)
#undef MEMSAVER_DECLARE
};

Nvrtc open_nvrtc() REQUIRES(compiling) {
  std::vector<std::string> names;
  if (!torch_path.empty()) names.push_back(torch_path);
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}) names.emplace_back(name);
  for (const auto& name : names) {
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) continue;
    Nvrtc nvrtc{};
    bool complete = true;
#define MEMSAVER_LOAD(name, symbol, arguments)                                 \
  nvrtc.name = reinterpret_cast<decltype(nvrtc.name)>(dlsym(library, symbol)); \
  complete = complete && nvrtc.name != nullptr;
    MEMSAVER_NVRTC_FUNCTIONS(MEMSAVER_LOAD)
#undef MEMSAVER_LOAD
    if (complete) return nvrtc;
  }
  throw Error(ErrorKind::configuration, "NVRTC (libnvrtc.so) cannot be opened; it comes with torch's CUDA packages");
}

std::uint64_t fnv1a(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

std::string cache_folder() {
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  std::string folder;
  if (home != nullptr && *home == '/') folder = std::string(home) + "/.cache";
  if (cache != nullptr && *cache == '/') folder = cache;
  if (folder.empty()) return "";
  mkdir(folder.c_str(), 0700);
  folder += "/memsaver";
  mkdir(folder.c_str(), 0700);
  return folder;
}

// Cached code is run unchecked, so only files that this user alone can write are read.
std::string read_own_file(const std::string& path) {
  struct stat status{};
  if (lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != getuid() ||
      (status.st_mode & 022) != 0) {
    return "";
  }
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void write_atomically(const std::string& path, const std::string& content) {
  const std::string part = path + "." + std::to_string(getpid());
  {
    std::ofstream file(part, std::ios::binary);
    file << content;
    if (!file.flush()) {
      unlink(part.c_str());
      return;
    }
  }
  chmod(part.c_str(), 0600);
  if (std::rename(part.c_str(), path.c_str()) != 0) unlink(part.c_str());
}

}  // namespace

void set_nvrtc_path(const std::string& path) {
  const Lock lock(compiling);
  torch_path = path;
}

std::string compile(const std::string& name, const std::string& source, const std::string& architecture) {
  const Lock lock(compiling);
  if (ended) throw Error(ErrorKind::configuration, "kernels are not compiled while the process ends");
  const Nvrtc nvrtc = open_nvrtc();
  int major = 0;
  int minor = 0;
  nvrtc.version(&major, &minor);
  char key[128];
  std::snprintf(key, sizeof key, "-%016llx-%s-nvrtc%d.%d.cubin", static_cast<unsigned long long>(fnv1a(source)),
                architecture.c_str(), major, minor);
  const std::string file = "/" + name + key;
  const std::string folder = cache_folder();
  if (!folder.empty()) {
    std::string cubin = read_own_file(folder + file);
    if (!cubin.empty()) return cubin;
  }
  void* program = nullptr;
  if (nvrtc.create(&program, source.c_str(), "memsaver.cu", 0, nullptr, nullptr) != 0) {
    throw Error(ErrorKind::configuration, "nvrtcCreateProgram failed");
  }
  const auto output = [&program](auto size_of, auto read) {
    std::size_t size = 0;
    size_of(program, &size);
    std::string text(size, '\0');
    if (size > 0) read(program, text.data());
    return text;
  };
  const std::string target = "--gpu-architecture=" + architecture;
  const char* options[] = {target.c_str()};
  if (nvrtc.compile(program, 1, options) != 0) {
    const std::string log = output(nvrtc.log_size, nvrtc.log);
    nvrtc.destroy(&program);
    throw Error(ErrorKind::configuration, "NVRTC cannot compile for " + architecture + ": " + log);
  }
  const std::string cubin = output(nvrtc.cubin_size, nvrtc.cubin);
  nvrtc.destroy(&program);
  if (!folder.empty()) write_atomically(folder + file, cubin);
  return cubin;
}

void end_compiling() noexcept {
  const Lock lock(compiling);
  ended = true;
}

}  // namespace memsaver::cuda
