#pragma once

#include <stddef.h>

// The interface between the preload library and the core. Plain C: the library is loaded into every process that
// inherits LD_PRELOAD and depends on libc alone; the core is loaded later, by Python, and owns the saver.
extern "C" {

inline constexpr int kMemsaverPreloadVersion = 1;

// The core does not handle this allocation: call the real function.
inline constexpr int kMemsaverNotMine = -1;

struct memsaver_preload_core {
  int version;
  // Both return a cudaError_t, or kMemsaverNotMine.
  int (*allocate)(void** pointer, size_t bytes, int device, const char* tag, bool cpu_backup, bool disk_backup);
  int (*free)(void* pointer);
};

// Exported by the library. `core` must stay valid until the process ends. Returns 0, or -1 if the version differs.
int memsaver_preload_register(const struct memsaver_preload_core* core);
}
