#pragma once

namespace memsaver::cuda {

// CUDA C++ of support/packing.hpp on the device: kernels memsaver_sample, memsaver_pack, memsaver_pack_finish and
// memsaver_unpack, with kPackingThreads in each block.
//
// One warp packs a group of 1,024 elements. In each of four steps a lane loads 8 neighbouring elements, 16 bytes in an
// access, and ballots turn their codes into words of the planes; lane n keeps word n of each plane. Escapes get their
// place by one atomic addition for each group, so the order of the groups' escapes differs from run to run.
//
// This uses C++ and a few intrinsics only, so that a test can run it on the CPU.
inline constexpr const char* kPackingKernels = R"cuda(
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Plan { u32 element_bytes; u8 exponents[8]; };
struct Item { u64 address; u64 bytes; };
struct Sample { u32 counts[512]; };
struct Header {
  u32 magic; u16 version; u16 element_bytes; u64 bytes; u64 escapes; u8 exponents[8]; u8 tail[8]; u8 reserved[24];
};

#define MAGIC 0x4B50534Du
#define VERSION 1
#define GROUP 1024
#define THREADS 256
#define ESCAPE 7
#define STRIPS 64
#define STRIP_BYTES 512
#define ALL 0xffffffffu

struct Layout { u64 elements; u64 groups; u64 lower; u64 planes; u64 offsets; u64 escapes; };

__device__ __forceinline__ Layout layout_of(u64 bytes, u32 element_bytes) {
  Layout layout;
  layout.elements = bytes / element_bytes;
  layout.groups = (layout.elements + GROUP - 1) / GROUP;
  layout.lower = sizeof(Header) + layout.groups * GROUP;
  layout.planes = layout.lower + layout.groups * GROUP * (element_bytes - 2);
  layout.offsets = layout.planes + layout.groups * 3 * (GROUP / 8);
  layout.escapes = layout.offsets + layout.groups * 4;
  return layout;
}

__device__ __forceinline__ u32 sum_of_warp(u32 value) {
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL, value, distance);
  return value;
}

extern "C" __global__ void __launch_bounds__(THREADS) memsaver_sample(const Item* items, Sample* samples) {
  __shared__ u32 counts[512];
  const Item item = items[blockIdx.x];
  const u8* data = reinterpret_cast<const u8*>(item.address);
  for (u32 i = threadIdx.x; i < 512; i += THREADS) counts[i] = 0;
  __syncthreads();
  for (u32 i = threadIdx.x; i < STRIPS * (STRIP_BYTES / 4); i += THREADS) {
    const u64 begin = item.bytes / STRIPS * (i / (STRIP_BYTES / 4)) / 16 * 16;
    const u64 at = begin + i % (STRIP_BYTES / 4) * 4;
    if (at + 4 > item.bytes) continue;
    const u32 words = *reinterpret_cast<const u32*>(data + at);
    atomicAdd(&counts[words >> 7 & 0xff], 1u);
    atomicAdd(&counts[256 + (words >> 23 & 0xff)], 1u);
  }
  __syncthreads();
  for (u32 i = threadIdx.x; i < 512; i += THREADS) samples[blockIdx.x].counts[i] = counts[i];
}

// Eight elements from `first` on: their upper 16 bits, and their lower ones if they have 4 bytes; zeros behind the end.
template <int ELEMENT>
__device__ __forceinline__ void load(const u8* from, u64 elements, u64 first, u32* upper, u32* lower) {
  if (first + 8 <= elements) {
    const uint4* at = reinterpret_cast<const uint4*>(from + first * ELEMENT);
    const uint4 one = __ldcs(at);
    const u32 words[4] = {one.x, one.y, one.z, one.w};
    if (ELEMENT == 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) upper[i] = words[i / 2] >> (i % 2 * 16) & 0xffff;
    } else {
      const uint4 two = __ldcs(at + 1);
      const u32 more[4] = {two.x, two.y, two.z, two.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const u32 word = i < 4 ? words[i % 4] : more[i % 4];
        upper[i] = word >> 16;
        lower[i] = word & 0xffff;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    upper[i] = lower[i] = 0;
    if (first + i >= elements) continue;
    const u16* at = reinterpret_cast<const u16*>(from + (first + i) * ELEMENT);
    upper[i] = at[ELEMENT / 2 - 1];
    if (ELEMENT == 4) lower[i] = at[0];
  }
}

template <int ELEMENT>
__device__ __forceinline__ void store(u8* to, u64 elements, u64 first, const u32* upper, const u32* lower) {
  if (first + 8 <= elements) {
    uint4* at = reinterpret_cast<uint4*>(to + first * ELEMENT);
    if (ELEMENT == 2) {
      *at = make_uint4(upper[0] | upper[1] << 16, upper[2] | upper[3] << 16, upper[4] | upper[5] << 16,
                       upper[6] | upper[7] << 16);
    } else {
      at[0] = make_uint4(lower[0] | upper[0] << 16, lower[1] | upper[1] << 16, lower[2] | upper[2] << 16,
                         lower[3] | upper[3] << 16);
      at[1] = make_uint4(lower[4] | upper[4] << 16, lower[5] | upper[5] << 16, lower[6] | upper[6] << 16,
                         lower[7] | upper[7] << 16);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (first + i >= elements) continue;
    u16* at = reinterpret_cast<u16*>(to + (first + i) * ELEMENT);
    at[ELEMENT / 2 - 1] = static_cast<u16>(upper[i]);
    if (ELEMENT == 4) at[0] = static_cast<u16>(lower[i]);
  }
}

template <int ELEMENT>
__device__ void pack_group(const u8* codes, const u8* from, u64 bytes, u8* to, u64 capacity, u64 group) {
  const Layout layout = layout_of(bytes, ELEMENT);
  if (group >= layout.groups) return;
  const u32 lane = threadIdx.x % 32;
  u32 upper[4][8];
  u32 mine[3] = {0, 0, 0};
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const u64 first = group * GROUP + part * 256 + lane * 8;
    u32 lower[8];
    load<ELEMENT>(from, layout.elements, first, upper[part], lower);
    u64 rest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 word = upper[part][i];
      const u32 code = first + i < layout.elements ? codes[word >> 7 & 0xff] : 0;
      rest |= static_cast<u64>((word >> 8 & 0x80) | (word & 0x7f)) << (8 * i);
      const u32 plane0 = __ballot_sync(ALL, code & 1);
      const u32 plane1 = __ballot_sync(ALL, code & 2);
      const u32 plane2 = __ballot_sync(ALL, code & 4);
      if (lane == static_cast<u32>(part * 8 + i)) {
        mine[0] = plane0;
        mine[1] = plane1;
        mine[2] = plane2;
      }
    }
    *reinterpret_cast<u64*>(to + sizeof(Header) + first) = rest;
    if (ELEMENT == 4) {
      *reinterpret_cast<uint4*>(to + layout.lower + first * 2) =
          make_uint4(lower[0] | lower[1] << 16, lower[2] | lower[3] << 16, lower[4] | lower[5] << 16,
                     lower[6] | lower[7] << 16);
    }
  }
  u32* planes = reinterpret_cast<u32*>(to + layout.planes) + group * 96;
  for (int plane = 0; plane < 3; ++plane) planes[plane * 32 + lane] = mine[plane];

  const u32 escaped = mine[0] & mine[1] & mine[2];
  const u32 count = sum_of_warp(__popc(escaped));
  u64 next = 0;
  if (lane == 0) {
    if (count != 0) next = atomicAdd(&reinterpret_cast<Header*>(to)->escapes, static_cast<u64>(count));
    reinterpret_cast<u32*>(to + layout.offsets)[group] = static_cast<u32>(next);
  }
  if (count == 0) return;
  next = __shfl_sync(ALL, next, 0);
  const u64 room = capacity - layout.escapes;
#pragma unroll
  for (int part = 0; part < 4; ++part) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 lanes = __shfl_sync(ALL, escaped, part * 8 + i);
      const u64 at = next + __popc(lanes & ((1u << lane) - 1));
      if ((lanes >> lane & 1) && at < room) to[layout.escapes + at] = static_cast<u8>(upper[part][i] >> 7);
      next += __popc(lanes);
    }
  }
}

// The header must be zeros before.
extern "C" __global__ void __launch_bounds__(THREADS)
    memsaver_pack(const Plan plan, const u8* from, u64 bytes, u8* to, u64 capacity) {
  __shared__ u8 codes[256];
  u8 code = ESCAPE;
  for (int i = ESCAPE - 1; i >= 0; --i) {
    if (plan.exponents[i] == threadIdx.x) code = static_cast<u8>(i);
  }
  codes[threadIdx.x] = code;
  __syncthreads();
  const u64 group = static_cast<u64>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
  if (plan.element_bytes == 2) {
    pack_group<2>(codes, from, bytes, to, capacity, group);
  } else {
    pack_group<4>(codes, from, bytes, to, capacity, group);
  }
}

// After memsaver_pack: completes the header, and writes the packed bytes, 0 if they did not fit.
extern "C" __global__ void memsaver_pack_finish(const Plan plan, const u8* from, u64 bytes, u8* to, u64 capacity,
                                                u64* packed_bytes) {
  if (threadIdx.x != 0) return;
  Header* header = reinterpret_cast<Header*>(to);
  header->magic = MAGIC;
  header->version = VERSION;
  header->element_bytes = static_cast<u16>(plan.element_bytes);
  header->bytes = bytes;
  for (int i = 0; i < 8; ++i) header->exponents[i] = plan.exponents[i];
  const Layout layout = layout_of(bytes, plan.element_bytes);
  const u64 whole = layout.elements * plan.element_bytes;
  for (u64 i = whole; i < bytes; ++i) header->tail[i - whole] = from[i];
  const u64 needed = layout.escapes + header->escapes;
  *packed_bytes = needed <= capacity ? needed : 0;
}

// Returns false if the group's escapes do not lie among the block's.
template <int ELEMENT>
__device__ bool unpack_group(const Header& header, const u8* from, u8* to, u64 group) {
  const Layout layout = layout_of(header.bytes, ELEMENT);
  if (group >= layout.groups) return true;
  const u32 lane = threadIdx.x % 32;
  const u32* planes = reinterpret_cast<const u32*>(from + layout.planes) + group * 96;
  const u32 mine[3] = {planes[lane], planes[32 + lane], planes[64 + lane]};
  const u32 escaped = mine[0] & mine[1] & mine[2];
  const u32 count = sum_of_warp(__popc(escaped));
  u64 next = reinterpret_cast<const u32*>(from + layout.offsets)[group];
  if (next + count > header.escapes) return false;
  const u64 exponents = *reinterpret_cast<const u64*>(header.exponents);
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const u64 first = group * GROUP + part * 256 + lane * 8;
    const u64 rest = *reinterpret_cast<const u64*>(from + sizeof(Header) + first);
    u32 upper[8];
    u32 lower[8];
    if (ELEMENT == 4) {
      const uint4 halves = *reinterpret_cast<const uint4*>(from + layout.lower + first * 2);
      const u32 words[4] = {halves.x, halves.y, halves.z, halves.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) lower[i] = words[i / 2] >> (i % 2 * 16) & 0xffff;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 plane0 = __shfl_sync(ALL, mine[0], part * 8 + i);
      const u32 plane1 = __shfl_sync(ALL, mine[1], part * 8 + i);
      const u32 plane2 = __shfl_sync(ALL, mine[2], part * 8 + i);
      const u32 lanes = plane0 & plane1 & plane2;
      const u32 code = (plane0 >> lane & 1) | (plane1 >> lane & 1) << 1 | (plane2 >> lane & 1) << 2;
      u32 exponent = static_cast<u32>(exponents >> (8 * code)) & 0xff;
      if (code == ESCAPE) exponent = from[layout.escapes + next + __popc(lanes & ((1u << lane) - 1))];
      next += __popc(lanes);
      const u32 parts = static_cast<u32>(rest >> (8 * i)) & 0xff;
      upper[i] = (parts & 0x80) << 8 | exponent << 7 | (parts & 0x7f);
    }
    store<ELEMENT>(to, layout.elements, first, upper, lower);
  }
  return true;
}

__device__ bool is_packed(const Header& header, u64 packed_bytes, u64 bytes) {
  if (header.magic != MAGIC || header.version != VERSION || header.bytes != bytes) return false;
  if (header.element_bytes != 2 && header.element_bytes != 4) return false;
  const Layout layout = layout_of(bytes, header.element_bytes);
  return layout.escapes <= packed_bytes && header.escapes == packed_bytes - layout.escapes;
}

// Sets *damaged if `from` is not the packed form of `bytes` of content. `packed_bytes` is that of a header at least.
extern "C" __global__ void __launch_bounds__(THREADS)
    memsaver_unpack(const u8* from, u64 packed_bytes, u8* to, u64 bytes, u64* damaged) {
  const Header& header = *reinterpret_cast<const Header*>(from);
  bool right = is_packed(header, packed_bytes, bytes);
  if (right) {
    const u64 group = static_cast<u64>(blockIdx.x) * (THREADS / 32) + threadIdx.x / 32;
    right = header.element_bytes == 2 ? unpack_group<2>(header, from, to, group)
                                      : unpack_group<4>(header, from, to, group);
    const u64 whole = bytes / header.element_bytes * header.element_bytes;
    if (blockIdx.x == 0 && threadIdx.x < bytes - whole) to[whole + threadIdx.x] = header.tail[threadIdx.x];
  }
  if (!right) *damaged = 1;
}
)cuda";

inline constexpr unsigned kPackingThreads = 256;
inline constexpr unsigned kPackingGroups = kPackingThreads / 32;  // of elements in each block

}  // namespace memsaver::cuda
