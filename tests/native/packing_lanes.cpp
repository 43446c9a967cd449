// Runs the kernels of driver/packing_kernels.hpp on the CPU, and compares them with the implementation for the host:
// packing_kernels.inc is their source, compiled here as C++. Each thread of a block is a coroutine that runs up to the
// next exchange with the others of its warp or block.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "check.hpp"
#include "driver/packing_kernels.hpp"
#include "support/packing.hpp"

namespace device {

struct Index {
  unsigned x = 0;
};
Index threadIdx;
Index blockIdx;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <typename Value>
Value __ldcs(const Value* from) {
  CHECK(reinterpret_cast<std::uintptr_t>(from) % sizeof(Value) == 0);
  return *from;
}

// The threads of one block.
struct Block {
  static constexpr unsigned kThreads = memsaver::cuda::kPackingThreads;
  static constexpr std::size_t kStack = 64 << 10;

  // Calls `body` in each thread of a block.
  void run(unsigned index, const std::function<void()>& body) {
    blockIdx.x = index;
    work = &body;
    for (unsigned i = 0; i < kThreads; ++i) {
      ended[i] = false;
      getcontext(&threads[i]);
      threads[i].uc_stack = {stacks.get() + i * kStack, 0, kStack};
      threads[i].uc_link = &scheduler;
      makecontext(&threads[i], &Block::enter, 0);
    }
    // Thread by thread up to its next exchange. All threads of a warp or block meet there, or have ended.
    for (bool any = true; any;) {
      any = false;
      for (unsigned i = 0; i < kThreads; ++i) {
        if (ended[i]) continue;
        any = true;
        threadIdx.x = i;
        swapcontext(&scheduler, &threads[i]);
      }
    }
  }

  static void enter() {
    Block& block = instance();
    (*block.work)();
    block.ended[threadIdx.x] = true;
  }
  // Returns once each other thread has come here, or to the same exchange of another warp.
  void meet() {
    const unsigned self = threadIdx.x;
    swapcontext(&threads[self], &scheduler);
    threadIdx.x = self;
  }
  // Two halves, so that no thread writes the next values before all have read these.
  unsigned long long exchange(unsigned long long value,
                              const std::function<unsigned long long(const unsigned long long*)>& pick) {
    values[threadIdx.x] = value;
    meet();
    const unsigned long long picked = pick(values + threadIdx.x / 32 * 32);
    meet();
    return picked;
  }

  static Block& instance() {
    static Block block;
    return block;
  }

  ucontext_t scheduler{};
  ucontext_t threads[kThreads]{};
  bool ended[kThreads] = {};
  unsigned long long values[kThreads] = {};
  std::unique_ptr<char[]> stacks{new char[kThreads * kStack]};
  const std::function<void()>* work = nullptr;
};

void __syncthreads() { Block::instance().meet(); }
unsigned __ballot_sync(unsigned, unsigned predicate) {
  return static_cast<unsigned>(Block::instance().exchange(predicate, [](const unsigned long long* lanes) {
    unsigned long long bits = 0;
    for (unsigned i = 0; i < 32; ++i) bits |= static_cast<unsigned long long>(lanes[i] != 0) << i;
    return bits;
  }));
}
template <typename Value>
Value __shfl_sync(unsigned, Value value, unsigned lane) {
  return static_cast<Value>(
      Block::instance().exchange(value, [=](const unsigned long long* lanes) { return lanes[lane]; }));
}
template <typename Value>
Value __shfl_xor_sync(unsigned, Value value, unsigned distance) {
  const unsigned lane = threadIdx.x % 32;
  return static_cast<Value>(
      Block::instance().exchange(value, [=](const unsigned long long* lanes) { return lanes[lane ^ distance]; }));
}
unsigned __popc(unsigned bits) { return static_cast<unsigned>(__builtin_popcount(bits)); }
template <typename Value>
Value atomicAdd(Value* at, Value more) {
  const Value before = *at;
  *at += more;
  return before;
}

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)
#define __shared__ static
#include <packing_kernels.inc>

}  // namespace device

using namespace memsaver;

namespace {

std::mt19937_64 numbers(20260102);

// Memory of exactly this size, at a multiple of 16 bytes.
struct Exact {
  explicit Exact(std::size_t size)
      : bytes(size), data(static_cast<unsigned char*>(std::aligned_alloc(16, (size + 15) / 16 * 16))) {}
  Exact(const Exact&) = delete;
  Exact& operator=(const Exact&) = delete;
  ~Exact() { std::free(data); }
  [[nodiscard]] std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(data); }
  std::size_t bytes;
  unsigned char* data;
};

void launch(std::size_t blocks, const std::function<void()>& kernel) {
  for (std::size_t i = 0; i < blocks; ++i) device::Block::instance().run(static_cast<unsigned>(i), kernel);
}

std::size_t blocks_for(std::size_t bytes, std::size_t element_bytes) {
  const std::size_t per_block = kPackedGroup * cuda::kPackingGroups * element_bytes;
  return std::max<std::size_t>(1, (bytes + per_block - 1) / per_block);
}

// As the driver for CUDA does it.
std::size_t pack(const PackPlan& plan, const Exact& content, Exact& packed) {
  device::Plan its_plan{plan.element_bytes, {}};
  std::memcpy(its_plan.exponents, plan.exponents, sizeof its_plan.exponents);
  std::memset(packed.data, 0, sizeof(PackedHeader));
  device::u64 bytes = 0;
  launch(blocks_for(content.bytes, plan.element_bytes),
         [&] { device::memsaver_pack(its_plan, content.data, content.bytes, packed.data, packed.bytes); });
  launch(1, [&] {
    device::memsaver_pack_finish(its_plan, content.data, content.bytes, packed.data, packed.bytes, &bytes);
  });
  return bytes;
}

bool unpack(const unsigned char* packed, std::size_t packed_bytes, Exact& content) {
  device::u64 damaged = 0;
  launch(blocks_for(content.bytes, 2),
         [&] { device::memsaver_unpack(packed, packed_bytes, content.data, content.bytes, &damaged); });
  return damaged == 0;
}

void fill(Exact& content, unsigned kind) {
  std::normal_distribution<float> normal(0, 0.02f);
  for (std::size_t at = 0; at < content.bytes; ++at) content.data[at] = static_cast<unsigned char>(numbers());
  if (kind == 0) return;
  const std::size_t size = kind == 1 ? 2 : 4;
  for (std::size_t at = 0; at + size <= content.bytes; at += size) {
    const float value = normal(numbers);
    std::memcpy(content.data + at, reinterpret_cast<const char*>(&value) + 4 - size, size);
  }
}

void kernels_equal_the_host(std::size_t bytes, unsigned kind) {
  Exact content(bytes);
  fill(content, kind);
  ExponentSample expected;
  sample_on_host(content.data, bytes, expected);
  ExponentSample sample;
  const device::Item item{content.address(), bytes};
  launch(1, [&] { device::memsaver_sample(&item, reinterpret_cast<device::Sample*>(&sample)); });
  CHECK(std::memcmp(&sample, &expected, sizeof sample) == 0);

  PackPlan plan = plan_packing(sample, bytes).plan;
  if (!plan.worth_it()) {
    plan.element_bytes = kind == 2 ? 4 : 2;
    for (std::size_t i = 0; i < kPackedEscape; ++i) plan.exponents[i] = static_cast<std::uint8_t>(120 + i);
  }
  Exact packed(packed_bytes_without_escapes(bytes, plan.element_bytes) + bytes);
  const std::size_t size = pack(plan, content, packed);
  CHECK(size > 0);
  Exact by_host(size);
  CHECK(pack_on_host(plan, content.data, bytes, by_host.data, size) == size);
  Exact small(size - 1);  // too small by a byte: reported, and not written beyond
  if (size > packed_bytes_without_escapes(bytes, plan.element_bytes)) CHECK(pack(plan, content, small) == 0);

  // Each unpacks what the other packed.
  Exact back(bytes);
  CHECK(unpack_on_host(packed.data, size, back.data, bytes));
  CHECK(std::memcmp(back.data, content.data, bytes) == 0);
  std::memset(back.data, 0xa5, bytes);
  CHECK(unpack(by_host.data, size, back));
  CHECK(std::memcmp(back.data, content.data, bytes) == 0);

  // What is damaged is reported by both or by neither, and unpacked alike.
  for (int round = 0; round < 4; ++round) {
    Exact damaged(size);
    std::memcpy(damaged.data, by_host.data, size);
    damaged.data[numbers() % (round < 2 ? std::min<std::size_t>(size, 64) : size)] ^=
        static_cast<unsigned char>(1u << numbers() % 8);
    Exact other(bytes);
    const bool right = unpack_on_host(damaged.data, size, other.data, bytes);
    CHECK(unpack(damaged.data, size, back) == right);
    if (right) CHECK(std::memcmp(back.data, other.data, bytes) == 0);
  }
  CHECK(!unpack(by_host.data, size - 1, back));
}

}  // namespace

int main() {
  for (unsigned kind = 0; kind < 3; ++kind) {
    for (const std::size_t bytes : {2ul, 5ul, 16ul, 2046ul, 2048ul, 4111ul, 16384ul, 30002ul, 70000ul}) {
      kernels_equal_the_host(bytes, kind);
    }
  }
  return 0;
}
