#pragma once

namespace memsaver::cuda {

// CUDA C++: support/packing.hpp on the device. Kernels memsaver_sample, memsaver_pack, memsaver_pack_finish and
// memsaver_unpack, each of kPackingThreads per block.
extern const char* const kPackingKernels;

inline constexpr unsigned kPackingThreads = 256;
inline constexpr unsigned kPackingGroups = kPackingThreads / 32;  // of elements, for each block

}  // namespace memsaver::cuda
