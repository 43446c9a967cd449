#include "support/digest.hpp"

#include <sys/random.h>

#include <cstring>

#include "support/error.hpp"

namespace memsaver {

DigestKey random_digest_key() {
  DigestKey key{};
  if (getrandom(&key, sizeof key, 0) != static_cast<ssize_t>(sizeof key)) {
    throw Error(ErrorKind::configuration, "getrandom gave no random bytes for the digest keys");
  }
  return key;
}

namespace {

inline std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = static_cast<Wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

Digest digest_on_host(const DigestKey& key, const DigestItem& item) {
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
