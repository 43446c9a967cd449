// Prints the source of the kernels that pack; with the path of an NVRTC library and an architecture, compiles it.

#include "driver/packing_kernels.hpp"

#include <cstdio>

#include "driver/nvrtc.hpp"
#include "support/error.hpp"

using namespace memsaver::cuda;

int main(int count, char** arguments) {
  if (count < 3) return std::puts(kPackingKernels) < 0 ? 1 : 0;
  set_nvrtc_path(arguments[1]);
  try {
    std::printf("%zu bytes\n", compile("packing", kPackingKernels, arguments[2]).size());
  } catch (const memsaver::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
