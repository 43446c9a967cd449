#pragma once

#include <sys/random.h>

#include "support/error.hpp"

namespace memsaver {

// The key of 128-bit digests of memory content. A range's digest is the sum of its parts' digests in any order, so
// thousands of thread blocks need no ordering. Each 16-byte word (x, y) at index i contributes, in each of two lanes,
//
//     fold((x ^ (key[2*lane] + i*weyl)) * (y ^ (key[2*lane+1] + i*weyl2)))        fold(p) = high64(p) ^ low64(p)
//
// modulo 2^64: the mixing step of wyhash and XXH3. The index enters both factors, so moving a word changes its term. A
// key comes from the operating system, once for each process or shared store, so content cannot be crafted against it.
//
// Two contents collide only if the differing terms cancel modulo 2^64. Over the random keys each term is close to
// uniform, so one lane collides with probability about 2^-64, and both about 2^-128. For 10^6 blocks that are compared
// every second for a year, the probability of any collision is 3.2e13 * 2^-128, about 1e-25.
struct DigestKey {
  std::uint64_t lane[4];
};

inline constexpr std::uint64_t kDigestWeyl = 0x9E3779B97F4A7C15ull;   // 2^64 / golden ratio, odd
inline constexpr std::uint64_t kDigestWeyl2 = 0xD1B54A32D192ED03ull;  // 2^64 / plastic number, odd
inline constexpr std::size_t kDigestWord = 16;

struct Digest {
  std::uint64_t lane0 = 0;
  std::uint64_t lane1 = 0;
  std::uint64_t any = 0;  // bitwise or of all words: 0 if the content is all zeros

  Digest& operator+=(const Digest& other) {
    lane0 += other.lane0;
    lane1 += other.lane1;
    any |= other.any;
    return *this;
  }
  friend bool operator==(const Digest& a, const Digest& b) { return a.lane0 == b.lane0 && a.lane1 == b.lane1; }
};

// Contiguous content.
struct DigestItem {
  std::uint64_t address;
  std::uint64_t bytes;       // a multiple of 16
  std::uint64_t first_word;  // the index of its first word
};

// Returns a key from getrandom(2). Throws configuration if that fails.
[[nodiscard]] inline DigestKey random_digest_key() {
  DigestKey key{};
  if (getrandom(&key, sizeof key, 0) != static_cast<ssize_t>(sizeof key)) {
    throw Error(ErrorKind::configuration, "getrandom gave no random bytes for the digest keys");
  }
  return key;
}

[[nodiscard]] inline Digest digest_on_host(const DigestKey& key, const DigestItem& item) {
  const auto fold = [](std::uint64_t a, std::uint64_t b) {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  };
  Digest sum;
  const auto* data = reinterpret_cast<const unsigned char*>(item.address);
  std::uint64_t first = item.first_word * kDigestWeyl;
  std::uint64_t second = item.first_word * kDigestWeyl2;
  for (std::uint64_t at = 0; at < item.bytes; at += kDigestWord) {
    std::uint64_t x;
    std::uint64_t y;
    std::memcpy(&x, data + at, 8);
    std::memcpy(&y, data + at + 8, 8);
    sum.lane0 += fold(x ^ (key.lane[0] + first), y ^ (key.lane[1] + second));
    sum.lane1 += fold(x ^ (key.lane[2] + first), y ^ (key.lane[3] + second));
    sum.any |= x | y;
    first += kDigestWeyl;
    second += kDigestWeyl2;
  }
  return sum;
}

}  // namespace memsaver
