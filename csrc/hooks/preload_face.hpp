#pragma once

#include <stddef.h>

// What the preload library and the core say to each other: plain C, because the library is loaded into every process
// that inherits LD_PRELOAD and brings nothing along, while the core comes later, with Python, and owns the saver.
extern "C" {

inline constexpr int kMemsaverPreloadVersion = 1;

// Given where the core does not want an allocation: the real function serves it.
inline constexpr int kMemsaverNotMine = -1;

struct memsaver_preload_core {
  int version;
  // Both return a cudaError_t, or kMemsaverNotMine.
  int (*allocate)(void** pointer, size_t bytes, int device, const char* tag, bool cpu_backup, bool disk_backup);
  int (*free)(void* pointer);
};

// Exported by the library. `core` must stay valid to the end of the process. Returns 0, or -1 for another version.
int memsaver_preload_register(const struct memsaver_preload_core* core);
}
