#pragma once

namespace memsaver::cuda {

// CUDA C++ of support/packing.hpp on the device: kernels memsaver_sample, memsaver_pack, memsaver_pack_finish and
// memsaver_unpack, with kPackingThreads in each block.
extern const char* const kPackingKernels;

inline constexpr unsigned kPackingThreads = 256;
inline constexpr unsigned kPackingGroups = kPackingThreads / 32;  // of elements in each block

}  // namespace memsaver::cuda
