#include "support/packing.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <numeric>

namespace memsaver {

namespace {

constexpr std::size_t kWords = kPackedGroup / 32;  // of a plane, for each group

// Where the parts of packed content lie.
struct Layout {
  std::size_t bytes;  // of the content
  std::size_t element_bytes;
  std::size_t elements = bytes / element_bytes;
  std::size_t groups = (elements + kPackedGroup - 1) / kPackedGroup;
  std::size_t lower = sizeof(PackedHeader) + groups * kPackedGroup;
  std::size_t planes = lower + groups * kPackedGroup * (element_bytes - 2);
  std::size_t offsets = planes + groups * 3 * kWords * 4;
  std::size_t escapes = offsets + groups * 4;

  [[nodiscard]] std::size_t in_group(std::size_t group) const {
    return std::min(kPackedGroup, elements - group * kPackedGroup);
  }
};

template <typename Value>
Value load(const unsigned char* from) {
  Value value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Returns the element to which a bit of a word belongs.
constexpr std::size_t element_of(std::size_t word, unsigned bit) { return word / 8 * 256 + bit * 8 + word % 8; }

// The codes of a group. The loops over eight neighbouring words become vector instructions.
struct Planes {
  std::uint32_t words[3][kWords];

  void set(const std::uint8_t (&codes)[kPackedGroup]) {
    for (std::size_t word = 0; word < kWords; word += 8) {
      std::uint32_t bits[3][8] = {};
      for (unsigned bit = 0; bit < 32; ++bit) {
        const std::uint8_t* const code = codes + element_of(word, bit);
        for (std::size_t j = 0; j < 8; ++j) {
          const std::uint32_t value = code[j];
          bits[0][j] |= (value & 1) << bit;
          bits[1][j] |= (value >> 1 & 1) << bit;
          bits[2][j] |= (value >> 2) << bit;
        }
      }
      for (std::size_t plane = 0; plane < 3; ++plane) std::memcpy(words[plane] + word, bits[plane], sizeof bits[plane]);
    }
  }
  void get(std::uint8_t (&codes)[kPackedGroup]) const {
    for (std::size_t word = 0; word < kWords; word += 8) {
      for (unsigned bit = 0; bit < 32; ++bit) {
        std::uint8_t* const code = codes + element_of(word, bit);
        for (std::size_t j = 0; j < 8; ++j) {
          code[j] = static_cast<std::uint8_t>((words[0][word + j] >> bit & 1) | (words[1][word + j] >> bit & 1) << 1 |
                                              (words[2][word + j] >> bit & 1) << 2);
        }
      }
    }
  }
  // Calls `visit(element)` for each escape, in order.
  template <typename Visit>
  void for_each_escape(const Visit& visit) const {
    for (std::size_t word = 0; word < kWords; ++word) {
      for (std::uint32_t bits = words[0][word] & words[1][word] & words[2][word]; bits != 0; bits &= bits - 1) {
        visit(element_of(word, static_cast<unsigned>(__builtin_ctz(bits))));
      }
    }
  }
  [[nodiscard]] std::size_t escapes() const {
    std::size_t sum = 0;
    for_each_escape([&](std::size_t) { ++sum; });
    return sum;
  }
};

// Divides a group of elements into exponents, signs with mantissas, and lower halves.
template <std::size_t kElement>
void split(const unsigned char* from, std::size_t count, std::uint8_t* exponents, unsigned char* rest,
           unsigned char* lower) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto upper = load<std::uint16_t>(from + i * kElement + kElement - 2);
    exponents[i] = static_cast<std::uint8_t>(upper >> 7);
    rest[i] = static_cast<unsigned char>((upper >> 8 & 0x80) | (upper & 0x7f));
    if (kElement == 4) std::memcpy(lower + i * 2, from + i * kElement, 2);
  }
}

template <std::size_t kElement>
void join(unsigned char* to, std::size_t count, const std::uint8_t* exponents, const unsigned char* rest,
          const unsigned char* lower) {
  for (std::size_t i = 0; i < count; ++i) {
    const unsigned parts = rest[i];
    const auto upper = static_cast<std::uint16_t>((parts & 0x80) << 8 | exponents[i] << 7 | (parts & 0x7f));
    std::memcpy(to + i * kElement + kElement - 2, &upper, 2);
    if (kElement == 4) std::memcpy(to + i * kElement, lower + i * 2, 2);
  }
}

// Makes the plan for elements of one size, and returns the bytes that it would take.
std::size_t plan_for(const std::uint32_t (&counts)[256], std::size_t bytes, std::size_t element_bytes, PackPlan& plan) {
  std::array<int, 256> order{};
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + kPackedEscape, order.end(),
                    [&](int a, int b) { return counts[a] != counts[b] ? counts[a] > counts[b] : a < b; });
  const std::uint64_t all = std::accumulate(std::begin(counts), std::end(counts), std::uint64_t{0});
  std::uint64_t coded = 0;
  plan.element_bytes = static_cast<std::uint32_t>(element_bytes);
  for (unsigned code = 0; code < kPackedEscape; ++code) {
    plan.exponents[code] = static_cast<std::uint8_t>(order[code]);
    coded += counts[order[code]];
  }
  if (all == 0) return std::numeric_limits<std::size_t>::max();
  const double escaped = static_cast<double>(all - coded) / static_cast<double>(all);
  return packed_bytes_without_escapes(bytes, element_bytes) +
         static_cast<std::size_t>(escaped * static_cast<double>(bytes / element_bytes));
}

std::size_t pack(const PackPlan& plan, const void* content, std::size_t bytes, void* packed, std::size_t capacity) {
  const Layout layout{bytes, plan.element_bytes};
  if (layout.escapes > capacity) return 0;
  const auto* const from = static_cast<const unsigned char*>(content);
  auto* const to = static_cast<unsigned char*>(packed);
  std::array<std::uint8_t, 256> codes{};  // by exponent
  codes.fill(kPackedEscape);
  for (unsigned code = kPackedEscape; code-- > 0;) codes[plan.exponents[code]] = static_cast<std::uint8_t>(code);
  const std::size_t room = capacity - layout.escapes;
  std::size_t escapes = 0;
  for (std::size_t group = 0; group < layout.groups; ++group) {
    const std::size_t first = group * kPackedGroup;
    const std::size_t count = layout.in_group(group);
    const unsigned char* const elements = from + first * plan.element_bytes;
    unsigned char* const rest = to + sizeof(PackedHeader) + first;
    unsigned char* const lower = to + layout.lower + first * 2;
    std::uint8_t exponents[kPackedGroup];
    plan.element_bytes == 2 ? split<2>(elements, count, exponents, rest, lower)
                            : split<4>(elements, count, exponents, rest, lower);
    std::memset(rest + count, 0, kPackedGroup - count);
    if (plan.element_bytes == 4) std::memset(lower + count * 2, 0, (kPackedGroup - count) * 2);
    std::uint8_t group_codes[kPackedGroup] = {};
    for (std::size_t i = 0; i < count; ++i) group_codes[i] = codes[exponents[i]];
    Planes planes;
    planes.set(group_codes);
    std::memcpy(to + layout.planes + group * sizeof planes, &planes, sizeof planes);
    const auto offset = static_cast<std::uint32_t>(escapes);
    std::memcpy(to + layout.offsets + group * 4, &offset, 4);
    if (planes.escapes() > room - escapes) return 0;
    planes.for_each_escape([&](std::size_t i) { to[layout.escapes + escapes++] = exponents[i]; });
  }
  PackedHeader header{
      kPackedMagic, kPackedVersion, static_cast<std::uint16_t>(plan.element_bytes), bytes, escapes, {}, {}, {}};
  std::memcpy(header.exponents, plan.exponents, sizeof header.exponents);
  std::memcpy(header.tail, from + layout.elements * plan.element_bytes, bytes % plan.element_bytes);
  std::memcpy(to, &header, sizeof header);
  return layout.escapes + escapes;
}

bool unpack(const void* packed, std::size_t packed_bytes, void* content, std::size_t bytes, std::size_t part,
            std::size_t parts) {
  const auto* const from = static_cast<const unsigned char*>(packed);
  auto* const to = static_cast<unsigned char*>(content);
  if (packed_bytes < sizeof(PackedHeader)) return false;
  const auto header = load<PackedHeader>(from);
  if (header.magic != kPackedMagic || header.version != kPackedVersion || header.bytes != bytes) return false;
  if (header.element_bytes != 2 && header.element_bytes != 4) return false;
  const Layout layout{bytes, header.element_bytes};
  if (layout.escapes > packed_bytes || header.escapes != packed_bytes - layout.escapes) return false;
  const std::size_t end = layout.groups * (part + 1) / parts;
  for (std::size_t group = layout.groups * part / parts; group < end; ++group) {
    const std::size_t first = group * kPackedGroup;
    const auto planes = load<Planes>(from + layout.planes + group * sizeof(Planes));
    std::size_t next = load<std::uint32_t>(from + layout.offsets + group * 4);
    if (next + planes.escapes() > header.escapes) return false;
    std::uint8_t exponents[kPackedGroup];
    planes.get(exponents);  // the codes, at first
    for (auto& each : exponents) each = header.exponents[each];
    planes.for_each_escape([&](std::size_t i) { exponents[i] = from[layout.escapes + next++]; });
    unsigned char* const elements = to + first * header.element_bytes;
    const unsigned char* const rest = from + sizeof(PackedHeader) + first;
    const unsigned char* const lower = from + layout.lower + first * 2;
    const std::size_t count = layout.in_group(group);
    header.element_bytes == 2 ? join<2>(elements, count, exponents, rest, lower)
                              : join<4>(elements, count, exponents, rest, lower);
  }
  std::memcpy(to + layout.elements * header.element_bytes, header.tail, bytes % header.element_bytes);
  return true;
}

#ifdef __x86_64__
template <typename Work>
[[gnu::target("avx2"), gnu::flatten]] auto with_avx2(const Work& work) {
  return work();
}
#endif

// Returns `work()`, compiled for AVX2 if the processor has it: about twice as fast.
template <typename Work>
auto vectorized(const Work& work) {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2")) return with_avx2(work);
#endif
  return work();
}

}  // namespace

PackEstimate plan_packing(const ExponentSample& sample, std::size_t bytes) {
  std::uint32_t both[256];
  for (std::size_t i = 0; i < 256; ++i) both[i] = sample.even[i] + sample.odd[i];
  PackPlan two;
  PackPlan four;
  const std::size_t as_two = plan_for(both, bytes, 2, two);
  const std::size_t as_four = plan_for(sample.odd, bytes, 4, four);
  if (std::min(as_two, as_four) > packed_limit(bytes)) return {{}, bytes};
  return as_two <= as_four ? PackEstimate{two, as_two} : PackEstimate{four, as_four};
}

void sample_on_host(const void* content, std::size_t bytes, ExponentSample& sample) {
  const auto* const data = static_cast<const unsigned char*>(content);
  sample = {};
  for (std::size_t strip = 0; strip < kSampleStrips; ++strip) {
    const std::size_t begin = bytes / kSampleStrips * strip / 16 * 16;
    const std::size_t end = std::min(bytes, begin + kSampleStripBytes);
    for (std::size_t at = begin; at + 4 <= end; at += 4) {
      ++sample.even[load<std::uint16_t>(data + at) >> 7 & 0xff];
      ++sample.odd[load<std::uint16_t>(data + at + 2) >> 7 & 0xff];
    }
  }
}

std::size_t pack_on_host(const PackPlan& plan, const void* content, std::size_t bytes, void* packed,
                         std::size_t capacity) {
  return vectorized([&] { return pack(plan, content, bytes, packed, capacity); });
}

bool unpack_on_host(const void* packed, std::size_t packed_bytes, void* content, std::size_t bytes, std::size_t part,
                    std::size_t parts) {
  return vectorized([&] { return unpack(packed, packed_bytes, content, bytes, part, parts); });
}

}  // namespace memsaver
