#include "hooks/preload.hpp"

#include <dlfcn.h>

#include "hooks/preload_interface.hpp"
#include "hooks/torch_allocator.hpp"

namespace memsaver {

namespace {

// Values of cudaError_t.
constexpr int kSuccess = 0;
constexpr int kMemoryAllocation = 2;
constexpr int kUnknown = 999;

// Never freed: the process may allocate until its very end.
std::atomic<const std::set<std::string>*> zeroed{new std::set<std::string>};

int allocate(void** pointer, size_t bytes, int device, const char* tag, bool cpu_backup, bool disk_backup) {
  Saver* const saver = active_saver();
  if (saver == nullptr) return kMemsaverNotMine;
  const auto failure = call_or_warn(ErrorKind::out_of_device_memory, [&] {
    const Restore restore = restore_for(tag, cpu_backup, disk_backup);
    *pointer = reinterpret_cast<void*>(saver->allocate({device, tag, restore}, bytes));
  });
  if (!failure) return kSuccess;
  return failure == ErrorKind::out_of_device_memory ? kMemoryAllocation : kUnknown;  // torch retries the former
}

int free(void* pointer) {
  Saver* const saver = active_saver();
  const auto address = reinterpret_cast<Address>(pointer);
  if (saver == nullptr || !saver->owns(address)) return kMemsaverNotMine;
  return free_or_warn(*saver, address) ? kSuccess : kUnknown;
}

constexpr memsaver_preload_core kCore{kMemsaverPreloadVersion, &allocate, &free};

}  // namespace

Restore restore_for(const std::string& tag, bool cpu_backup, bool disk_backup) {
  if (cpu_backup) return Restore::host;
  if (disk_backup) return Restore::file;
  return zeroed.load()->count(tag) != 0 ? Restore::zero : Restore::discard;
}

std::string attach_preload_library(std::set<std::string> zeroed_tags) {
  zeroed = new std::set<std::string>(std::move(zeroed_tags));
  void* const symbol = dlsym(RTLD_DEFAULT, "memsaver_preload_register");
  if (symbol == nullptr) return {};
  Dl_info info{};
  const std::string path = dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
  if (reinterpret_cast<decltype(&memsaver_preload_register)>(symbol)(&kCore) != 0) {
    throw Error(ErrorKind::configuration, "the preload library " + path + " is of another version of memsaver")
        .with_advice("preload the one beside memsaver_core");
  }
  return path;
}

}  // namespace memsaver
