#pragma once

namespace memsaver::cuda {

inline constexpr unsigned kDigestThreads = 256;
inline constexpr const char* kDigestKernelName = "memsaver_digest";

// support/digest.hpp on the device, one thread block per item. Eight 16-byte loads in flight per thread saturate the
// memory and hide the arithmetic (two 64 x 64 -> 128 products a word). __ldcs: the content is read once, so it should
// not evict the engine's lines from the cache.
inline constexpr const char* kDigestKernelSource = R"cuda(
typedef unsigned long long u64;

struct Key { u64 lane[4]; };
struct Item { u64 address; u64 bytes; u64 first_word; };
struct Digest { u64 lane0; u64 lane1; u64 any; };

#define WEYL 0x9E3779B97F4A7C15ull
#define WEYL2 0xD1B54A32D192ED03ull
#define THREADS 256
#define UNROLL 8

__device__ __forceinline__ u64 fold(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }

__device__ __forceinline__ void add(Digest& sum, const Key& key, ulonglong2 word, u64 index) {
  const u64 first = index * WEYL;
  const u64 second = index * WEYL2;
  sum.lane0 += fold(word.x ^ (key.lane[0] + first), word.y ^ (key.lane[1] + second));
  sum.lane1 += fold(word.x ^ (key.lane[2] + first), word.y ^ (key.lane[3] + second));
  sum.any |= word.x | word.y;
}

extern "C" __global__ void __launch_bounds__(THREADS) memsaver_digest(const Key key, const Item* items, Digest* results) {
  const Item item = items[blockIdx.x];
  const ulonglong2* data = reinterpret_cast<const ulonglong2*>(item.address);
  const u64 words = item.bytes / 16;
  Digest sum = {0, 0, 0};
  u64 at = threadIdx.x;
  for (; at + (UNROLL - 1) * THREADS < words; at += UNROLL * THREADS) {
    ulonglong2 word[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) word[i] = __ldcs(data + at + i * THREADS);
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) add(sum, key, word[i], item.first_word + at + i * THREADS);
  }
  for (; at < words; at += THREADS) add(sum, key, __ldcs(data + at), item.first_word + at);

  for (int offset = 16; offset > 0; offset /= 2) {
    sum.lane0 += __shfl_down_sync(0xffffffffu, sum.lane0, offset);
    sum.lane1 += __shfl_down_sync(0xffffffffu, sum.lane1, offset);
    sum.any |= __shfl_down_sync(0xffffffffu, sum.any, offset);
  }
  __shared__ Digest warps[THREADS / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < THREADS / 32; ++i) {
      sum.lane0 += warps[i].lane0;
      sum.lane1 += warps[i].lane1;
      sum.any |= warps[i].any;
    }
    results[blockIdx.x] = sum;
  }
}
)cuda";

}  // namespace memsaver::cuda
