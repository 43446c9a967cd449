#include "hooks/torch_allocator.hpp"

namespace memsaver {

namespace {

std::atomic<Saver*> saver{nullptr};
Mutex regions_mutex;
// By number, without the device, which each call gives.
std::vector<Arena::Key>& regions GUARDED_BY(regions_mutex) = *new std::vector<Arena::Key>;

// Returns null on failure: torch frees its caches, retries, raises OutOfMemoryError. Torch holds its allocator's lock.
void* allocate(int region, ssize_t bytes, int device) noexcept {
  Address address = 0;
  static_cast<void>(call_or_warn(ErrorKind::out_of_device_memory, [&] {
    Arena::Key key;
    {
      const Lock lock(regions_mutex);
      key = regions.at(static_cast<std::size_t>(region));
    }
    key.device = device;
    Saver* const active = active_saver();
    if (active == nullptr) throw Error(ErrorKind::configuration, "memsaver is not set up");
    address = active->allocate(key, static_cast<std::size_t>(bytes));
  }));
  return reinterpret_cast<void*>(address);
}

}  // namespace

Saver* active_saver() noexcept { return saver.load(); }
void set_active_saver(Saver* active) noexcept { saver.store(active); }

std::optional<ErrorKind> call_or_warn(ErrorKind expected, const std::function<void()>& call) noexcept {
  try {
    call();
    return std::nullopt;
  } catch (const Error& error) {
    if (error.kind != expected) warn(error.what());
    return error.kind;
  } catch (const std::exception& error) {
    warn(error.what());
    return ErrorKind::driver;
  }
}

bool free_or_warn(Saver& owner, Address address) noexcept {
  const auto failure = call_or_warn(ErrorKind::forked, [&] { owner.free(address); });
  return !failure || failure == ErrorKind::forked;
}

int allocator_for(const std::string& tag, Restore restore, std::size_t chunk_bytes) {
  const Lock lock(regions_mutex);
  for (std::size_t i = 0; i < regions.size(); ++i) {
    const Arena::Key& each = regions[i];
    if (each.tag == tag && each.restore == restore && each.chunk_bytes == chunk_bytes) return static_cast<int>(i);
  }
  if (regions.size() == kAllocators) {
    throw Error(ErrorKind::configuration, "no more than " + std::to_string(kAllocators) +
                                              " sets of tag, restore policy and chunk size can be used in one process")
        .with_tag(tag)
        .with_advice("use fewer tags");
  }
  regions.push_back({0, tag, restore, chunk_bytes});
  return static_cast<int>(regions.size() - 1);
}

}  // namespace memsaver

#define MEMSAVER_EXPORT extern "C" __attribute__((visibility("default")))

MEMSAVER_EXPORT void memsaver_torch_free(void* pointer, ssize_t, int, void*) {
  auto* const active = memsaver::active_saver();
  if (active != nullptr) memsaver::free_or_warn(*active, reinterpret_cast<memsaver::Address>(pointer));
}

#define MEMSAVER_MALLOC(number)                                                            \
  MEMSAVER_EXPORT void* memsaver_torch_malloc_##number(ssize_t bytes, int device, void*) { \
    return memsaver::allocate(number, bytes, device);                                      \
  }
#define MEMSAVER_MALLOC_8(a, b, c, d, e, f, g, h) \
  MEMSAVER_MALLOC(a)                              \
  MEMSAVER_MALLOC(b)                              \
  MEMSAVER_MALLOC(c) MEMSAVER_MALLOC(d) MEMSAVER_MALLOC(e) MEMSAVER_MALLOC(f) MEMSAVER_MALLOC(g) MEMSAVER_MALLOC(h)
MEMSAVER_MALLOC_8(0, 1, 2, 3, 4, 5, 6, 7)
MEMSAVER_MALLOC_8(8, 9, 10, 11, 12, 13, 14, 15)
MEMSAVER_MALLOC_8(16, 17, 18, 19, 20, 21, 22, 23)
MEMSAVER_MALLOC_8(24, 25, 26, 27, 28, 29, 30, 31)
MEMSAVER_MALLOC_8(32, 33, 34, 35, 36, 37, 38, 39)
MEMSAVER_MALLOC_8(40, 41, 42, 43, 44, 45, 46, 47)
MEMSAVER_MALLOC_8(48, 49, 50, 51, 52, 53, 54, 55)
MEMSAVER_MALLOC_8(56, 57, 58, 59, 60, 61, 62, 63)
