// Stands in for the CUDA runtime library, to test the preload library without a GPU. Its memory is ordinary memory.

#include <cstdlib>

namespace {
int mallocs = 0;
int frees = 0;
bool capturing = false;

int allocate(void** pointer, std::size_t bytes) {
  ++mallocs;
  *pointer = std::malloc(bytes);
  return 0;
}
int give_back(void* pointer) {
  ++frees;
  std::free(pointer);
  return 0;
}
}  // namespace

extern "C" {
int cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cudaMalloc(void** pointer, std::size_t bytes) { return allocate(pointer, bytes); }
int cudaFree(void* pointer) { return give_back(pointer); }
int cudaMallocAsync(void** pointer, std::size_t bytes, void*) { return allocate(pointer, bytes); }
int cudaFreeAsync(void* pointer, void*) { return give_back(pointer); }
int cudaStreamIsCapturing(void*, int* status) {
  *status = capturing ? 1 : 0;
  return 0;
}
void fake_set_capturing(bool value) { capturing = value; }
int fake_mallocs() { return mallocs; }
int fake_frees() { return frees; }
}
