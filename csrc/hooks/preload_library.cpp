// libmemsaver_preload.so: inside a region of the calling thread, cudaMalloc and related functions allocate from the
// saver, once the core is imported and registers itself. Depends on libc alone, and exports only C symbols.

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "hooks/preload_interface.hpp"

namespace {

constexpr int kSuccess = 0;
constexpr int kInitializationError = 3;  // cudaErrorInitializationError
constexpr size_t kTagBytes = 512;
constexpr size_t kPathBytes = 4096;

std::atomic<const memsaver_preload_core*> core{nullptr};
std::atomic<int (*)(const char*)> pause_all{nullptr};
std::atomic<int (*)(const char*)> resume_all{nullptr};

bool flag_from_environment(const char* name) {
  const char* const value = std::getenv(name);
  if (value == nullptr) return false;
  for (const char* yes : {"1", "true", "TRUE", "yes", "YES"}) {
    if (std::strcmp(value, yes) == 0) return true;
  }
  for (const char* no : {"0", "false", "FALSE", "no", "NO"}) {
    if (std::strcmp(value, no) == 0) return false;
  }
  std::fprintf(stderr, "memsaver: warning: %s='%s' is neither 1 nor 0; taken as 0\n", name, value);
  return false;
}

// A thread's region. A new thread starts with the settings of the environment.
struct Region {
  bool active = flag_from_environment("TMS_INIT_ENABLE");
  bool cpu_backup = flag_from_environment("TMS_INIT_ENABLE_CPU_BACKUP");
  bool disk_backup = flag_from_environment("TMS_INIT_ENABLE_DISK_BACKUP");
  char tag[kTagBytes] = "default";
  char backend[16] = "pinned";

  Region() {
    if (const char* const value = std::getenv("TMS_INIT_CPU_BACKUP_BACKEND")) set(backend, value);
  }
  template <size_t size>
  static void set(char (&field)[size], const char* value) {
    std::snprintf(field, size, "%s", value);
  }
};

Region& region() {
  static thread_local Region mine;
  return mine;
}

// Writes the path of a loaded library, if it is a CUDA runtime, to `path`, which has kPathBytes.
int find_runtime(dl_phdr_info* info, size_t, void* path) {
  const char* const slash = std::strrchr(info->dlpi_name, '/');
  const char* const name = slash != nullptr ? slash + 1 : info->dlpi_name;
  if (std::strncmp(name, "libcudart.so", 12) != 0) return 0;
  std::snprintf(static_cast<char*>(path), kPathBytes, "%s", info->dlpi_name);
  return 1;
}

// The function that this library replaces: the next one in the global scope, or else that of a CUDA runtime loaded with
// RTLD_LOCAL. Warns and fails if no CUDA runtime is loaded as a shared library.
struct RealFunction {
  const char* name;
  std::atomic<void*> known{nullptr};

  template <typename... Arguments>
  int operator()(Arguments... arguments) {
    void* found = known.load(std::memory_order_acquire);
    if (found == nullptr) found = dlsym(RTLD_NEXT, name);
    if (found == nullptr) {
      char path[kPathBytes];
      if (dl_iterate_phdr(find_runtime, path) != 0) {
        if (void* const handle = dlopen(path, RTLD_LAZY | RTLD_NOLOAD)) found = dlsym(handle, name);
      }
    }
    known.store(found, std::memory_order_release);
    if (found != nullptr) return reinterpret_cast<int (*)(Arguments...)>(found)(arguments...);
    std::fprintf(stderr, "memsaver: warning: %s was called, and no shared CUDA runtime is loaded\n", name);
    return kInitializationError;
  }
};
RealFunction real_malloc{"cudaMalloc"}, real_free{"cudaFree"};
RealFunction real_malloc_async{"cudaMallocAsync"}, real_free_async{"cudaFreeAsync"};
RealFunction real_get_device{"cudaGetDevice"}, real_is_capturing{"cudaStreamIsCapturing"};

int allocate(void** pointer, size_t bytes) {
  const memsaver_preload_core* const saver = core.load(std::memory_order_acquire);
  if (saver == nullptr || pointer == nullptr || bytes == 0) return kMemsaverNotMine;
  const Region& mine = region();
  if (!mine.active) return kMemsaverNotMine;
  int device = 0;
  const int code = real_get_device(&device);
  if (code != kSuccess) return code;
  return saver->allocate(pointer, bytes, device, mine.tag, mine.cpu_backup, mine.disk_backup);
}

int give_back(void* pointer) {
  const memsaver_preload_core* const saver = core.load(std::memory_order_acquire);
  return saver == nullptr || pointer == nullptr ? kMemsaverNotMine : saver->free(pointer);
}

// During capture, an allocation becomes part of the graph, which only the real function can do.
bool is_capturing(void* stream) {
  int status = 0;
  return real_is_capturing(stream, &status) == kSuccess && status != 0;
}

}  // namespace

#define MEMSAVER_EXPORT extern "C" __attribute__((visibility("default")))

MEMSAVER_EXPORT int cudaMalloc(void** pointer, size_t bytes) {
  const int code = allocate(pointer, bytes);
  return code != kMemsaverNotMine ? code : real_malloc(pointer, bytes);
}

MEMSAVER_EXPORT int cudaFree(void* pointer) {
  const int code = give_back(pointer);
  return code != kMemsaverNotMine ? code : real_free(pointer);
}

MEMSAVER_EXPORT int cudaMallocAsync(void** pointer, size_t bytes, void* stream) {
  const int code = region().active && !is_capturing(stream) ? allocate(pointer, bytes) : kMemsaverNotMine;
  return code != kMemsaverNotMine ? code : real_malloc_async(pointer, bytes, stream);
}

// Waits for the device, as cudaFree does, if the memory is the saver's.
MEMSAVER_EXPORT int cudaFreeAsync(void* pointer, void* stream) {
  const int code = give_back(pointer);
  return code != kMemsaverNotMine ? code : real_free_async(pointer, stream);
}

MEMSAVER_EXPORT int memsaver_preload_register(const memsaver_preload_core* given) {
  if (given->version != kMemsaverPreloadVersion) return -1;
  core.store(given, std::memory_order_release);
  return 0;
}

MEMSAVER_EXPORT void memsaver_preload_set_operations(int (*pause)(const char*), int (*resume)(const char*)) {
  pause_all.store(pause);
  resume_all.store(resume);
}

MEMSAVER_EXPORT bool tms_get_interesting_region() { return region().active; }
MEMSAVER_EXPORT void tms_set_interesting_region(bool value) { region().active = value; }
MEMSAVER_EXPORT bool tms_get_enable_cpu_backup() { return region().cpu_backup; }
MEMSAVER_EXPORT void tms_set_enable_cpu_backup(bool value) { region().cpu_backup = value; }
MEMSAVER_EXPORT bool tms_get_enable_disk_backup() { return region().disk_backup; }
MEMSAVER_EXPORT void tms_set_enable_disk_backup(bool value) { region().disk_backup = value; }
MEMSAVER_EXPORT const char* tms_get_current_tag() { return region().tag; }
MEMSAVER_EXPORT void tms_set_current_tag(const char* value) {
  if (value != nullptr) Region::set(region().tag, value);
}
MEMSAVER_EXPORT const char* tms_get_cpu_backup_backend() { return region().backend; }
MEMSAVER_EXPORT void tms_set_cpu_backup_backend(const char* value) {
  if (value != nullptr) Region::set(region().backend, value);
}

// Returns 0 if done or if there is nothing to do, 1 on failure, with a message on standard error.
MEMSAVER_EXPORT int tms_pause(const char* tag) {
  auto* const run = pause_all.load();
  return run != nullptr ? run(tag) : 0;
}
MEMSAVER_EXPORT int tms_resume(const char* tag) {
  auto* const run = resume_all.load();
  return run != nullptr ? run(tag) : 0;
}
