// Packed content comes back bit for bit, whatever it is; what is not packed content is refused. Memory has exactly the
// size that is named, so that an address sanitizer sees every access outside.

#include "support/packing.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"

using namespace memsaver;

namespace {

using Bytes = std::vector<unsigned char>;
std::mt19937_64 numbers(20260101);

// Memory of exactly this size: a vector may have more behind its end.
struct Exact {
  explicit Exact(std::size_t size) : bytes(size), data(new unsigned char[size]) {}
  explicit Exact(const Bytes& content) : Exact(content.size()) {
    std::copy(content.begin(), content.end(), data.get());
  }
  std::size_t bytes;
  std::unique_ptr<unsigned char[]> data;
};

PackPlan plan_of(const Bytes& content) {
  const Exact exact(content);
  ExponentSample sample;
  sample_on_host(exact.data.get(), exact.bytes, sample);
  return plan_packing(sample, exact.bytes).plan;
}

// Packs with room for everything, and compares what comes back. Returns the packed bytes.
Bytes there_and_back(const PackPlan& plan, const Bytes& content) {
  const Exact from(content);
  Exact packed(packed_bytes_without_escapes(content.size(), plan.element_bytes) + content.size() + kPackedGroup);
  const std::size_t bytes = pack_on_host(plan, from.data.get(), from.bytes, packed.data.get(), packed.bytes);
  CHECK(bytes > 0);
  const Exact fitting(Bytes(packed.data.get(), packed.data.get() + bytes));
  Exact back(content.size());
  CHECK(unpack_on_host(fitting.data.get(), fitting.bytes, back.data.get(), back.bytes));
  CHECK(std::equal(content.begin(), content.end(), back.data.get()));
  // One byte less of room is too little, and is not written beyond.
  Exact small(bytes - 1);
  CHECK(pack_on_host(plan, from.data.get(), from.bytes, small.data.get(), small.bytes) == 0);
  return {fitting.data.get(), fitting.data.get() + bytes};
}

Bytes random_bytes(std::size_t bytes) {
  Bytes content(bytes);
  for (auto& byte : content) byte = static_cast<unsigned char>(numbers());
  return content;
}

// Normal values of several scales, cut to the upper `bytes` of a float.
Bytes weights(std::size_t count, std::size_t bytes) {
  Bytes content(count * bytes);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < count; ++i) {
    const float value = std::ldexp(normal(numbers), -5 - static_cast<int>(i * 5 / count) % 2);
    std::memcpy(content.data() + i * bytes, reinterpret_cast<const char*>(&value) + (4 - bytes), bytes);
  }
  return content;
}

// The same as IEEE half precision; none of these values is outside of its range.
Bytes half_weights(std::size_t count) {
  Bytes content = weights(count, 4);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, content.data() + i * 4, 4);
    const int exponent = static_cast<int>(bits >> 23 & 0xff) - 127 + 15;
    const std::uint16_t half = static_cast<std::uint16_t>(
        (bits >> 16 & 0x8000) | (exponent > 0 ? static_cast<unsigned>(exponent) << 10 | (bits >> 13 & 0x3ff) : 0));
    std::memcpy(content.data() + i * 2, &half, 2);
  }
  content.resize(count * 2);
  return content;
}

// FP8 of type E4M3, of the weights divided by their largest: half precision cut to its upper bits.
Bytes eighth_weights(std::size_t count) {
  Bytes content = weights(count, 4);
  for (std::size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, content.data() + i * 4, 4);
    value *= 4096;  // the largest is about 448
    int exponent;
    const float mantissa = std::frexp(std::abs(value), &exponent);
    unsigned bits = exponent + 6 > 0 ? static_cast<unsigned>(exponent + 6) << 3 : 0;
    if (bits != 0) bits |= static_cast<unsigned>(mantissa * 16) & 7;
    content[i] = static_cast<unsigned char>((std::signbit(value) ? 0x80 : 0) | std::min(bits, 0x7eu));
  }
  content.resize(count);
  return content;
}

PackPlan any_plan() {
  PackPlan plan;
  plan.element_bytes = numbers() % 2 == 0 ? 2 : 4;
  for (std::size_t i = 0; i < kPackedEscape; ++i) plan.exponents[i] = static_cast<std::uint8_t>(numbers());
  return plan;
}

void any_bytes_come_back() {
  for (std::size_t bytes = 0; bytes < 70; ++bytes) there_and_back(any_plan(), random_bytes(bytes));
  for (int round = 0; round < 300; ++round) {
    Bytes content = random_bytes(numbers() % 20000);
    // Runs of one byte, as zeros and repeated values are.
    for (int runs = static_cast<int>(numbers() % 4); runs > 0 && !content.empty(); --runs) {
      const std::size_t begin = numbers() % content.size();
      const std::size_t end = begin + numbers() % (content.size() - begin + 1);
      std::fill(content.begin() + static_cast<long>(begin), content.begin() + static_cast<long>(end),
                static_cast<unsigned char>(numbers()));
    }
    there_and_back(any_plan(), content);
  }
}

// Every value of 16 bits, NaN payloads, denormals and infinities among them; as the upper half of 32 bits, too.
void every_pattern_comes_back() {
  Bytes two(2 * 65536);
  Bytes four(4 * 65536);
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto pattern = static_cast<std::uint16_t>(i);
    const std::uint32_t wide = i << 16 | (i * 40503 & 0xffff);
    std::memcpy(two.data() + 2 * i, &pattern, 2);
    std::memcpy(four.data() + 4 * i, &wide, 4);
  }
  for (int round = 0; round < 20; ++round) {
    PackPlan plan = any_plan();
    plan.element_bytes = 2;
    there_and_back(plan, two);
    plan.element_bytes = 4;
    there_and_back(plan, four);
  }
}

struct Saving {
  const char* what;
  Bytes content;
  std::uint32_t element_bytes;  // of the plan
  double at_most;               // of the content
};

void plans_are_worth_it() {
  constexpr std::size_t kCount = 1 << 20;
  Bytes halves = weights(kCount, 2);
  const Bytes noise = random_bytes(kCount);
  Bytes mixed = halves;
  std::copy(noise.begin(), noise.end(), mixed.begin() + kCount);
  const std::vector<Saving> cases{{"bfloat16", halves, 2, 0.72},
                                  {"float32", weights(kCount, 4), 4, 0.86},
                                  {"float16", half_weights(kCount), 0, 1},
                                  {"FP8 E4M3", eighth_weights(kCount), 0, 1},
                                  {"half bfloat16, half noise", mixed, 0, 1},
                                  {"noise", noise, 0, 1},
                                  {"one word", Bytes(2, 1), 0, 1},
                                  {"nothing", {}, 0, 1}};
  for (const auto& [what, content, element_bytes, at_most] : cases) {
    const PackPlan plan = plan_of(content);
    if (plan.element_bytes != element_bytes) std::fprintf(stderr, "%s: %u bytes\n", what, plan.element_bytes);
    CHECK(plan.element_bytes == element_bytes);
    if (!plan.worth_it()) continue;
    const Bytes packed = there_and_back(plan, content);
    std::printf("%s: %.3f of the content\n", what,
                static_cast<double>(packed.size()) / static_cast<double>(content.size()));
    CHECK(static_cast<double>(packed.size()) <= at_most * static_cast<double>(content.size()));
    CHECK(packed.size() <= packed_limit(content.size()));
  }
}

// Returns whether it was unpacked.
bool unpacked(const Bytes& packed, std::size_t bytes) {
  const Exact from(packed);
  Exact to(bytes);
  return unpack_on_host(from.data.get(), from.bytes, to.data.get(), to.bytes);
}

void what_is_not_packed_is_refused() {
  const Bytes content = weights(5000, 2);
  const Bytes packed = there_and_back(plan_of(content), content);
  CHECK(unpacked(packed, content.size()));
  const auto refused = [&](const std::function<void(PackedHeader&)>& change) {
    Bytes other = packed;
    PackedHeader header;
    std::memcpy(&header, other.data(), sizeof header);
    change(header);
    std::memcpy(other.data(), &header, sizeof header);
    CHECK(!unpacked(other, content.size()));
  };
  refused([](auto& header) { ++header.magic; });
  refused([](auto& header) { ++header.version; });
  refused([](auto& header) { header.element_bytes = 4; });
  refused([](auto& header) { header.element_bytes = 0; });
  refused([](auto& header) { header.bytes += 2; });
  refused([](auto& header) { ++header.escapes; });
  refused([](auto& header) { header.escapes = ~std::uint64_t{0}; });
  CHECK(!unpacked(packed, content.size() + 1));
  CHECK(!unpacked(packed, 0));
  for (std::size_t bytes = 0; bytes < packed.size(); ++bytes) {
    CHECK(!unpacked({packed.begin(), packed.begin() + static_cast<long>(bytes)}, content.size()));
  }
  // A group's escapes would lie behind the end.
  Bytes other = packed;
  const std::size_t offsets = packed_bytes_without_escapes(content.size(), 2) - 4 * ((5000 + 1023) / 1024);
  std::fill_n(other.begin() + static_cast<long>(offsets), 4, 0xff);
  CHECK(!unpacked(other, content.size()));
}

// Whatever was changed: it is refused, or gives other content; nothing outside is touched.
void changed_bytes_do_no_harm() {
  std::size_t refused = 0;
  for (int round = 0; round < 3000; ++round) {
    const Bytes content = round % 2 == 0 ? weights(1 + numbers() % 3000, 2) : random_bytes(numbers() % 6000);
    Bytes packed = there_and_back(any_plan(), content);
    for (std::size_t changes = 1 + numbers() % 8; changes > 0; --changes) {
      // Half of the changes in the header.
      const std::size_t within = numbers() % 2 == 0 ? std::min<std::size_t>(64, packed.size()) : packed.size();
      packed[numbers() % within] = static_cast<unsigned char>(numbers());
    }
    if (!unpacked(packed, content.size())) ++refused;
    if (!unpacked(random_bytes(numbers() % 5000), content.size())) ++refused;
  }
  CHECK(refused > 3000);
}

}  // namespace

int main() {
  any_bytes_come_back();
  every_pattern_comes_back();
  plans_are_worth_it();
  what_is_not_packed_is_refused();
  changed_bytes_do_no_harm();
  return 0;
}
