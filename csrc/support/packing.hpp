#pragma once

#include <cstddef>
#include <cstdint>

namespace memsaver {

// Packed content: the exponents of weights take few values, so they are kept as 3-bit codes. It is lossless.
//
// Content is read as elements of 2 bytes (bfloat16) or 4 bytes (float32), whose upper 16 bits are a sign, 8 bits of
// exponent and 7 of mantissa. Seven exponents have a code each; the eighth code is an escape. Of elements with 5 bits
// of exponent (float16) 3-bit codes save less than an eighth, so these stay as they are.
//
// Format, version 1, little-endian. Elements are in groups of 1,024; the last group is filled up with zeros.
//     PackedHeader
//     sign and mantissa of each element                          1 byte each
//     the lower 16 bits of each element, if it has 4 bytes       2 bytes each
//     codes: three bit planes for each group                     3 x 32 words of 4 bytes
//     the index of each group's first escape                     4 bytes each
//     escaped exponents                                          1 byte each
// Element i of a group is bit i % 256 / 8 of word i / 256 * 8 + i % 8 in each plane, so that a warp that loads 16 bytes
// in each lane gets the words by ballots. A group's escapes are in the order of the words, then of the bits; the
// groups' lists may be in any order.
inline constexpr std::uint32_t kPackedMagic = 0x4B50534D;  // "MSPK"
inline constexpr std::uint16_t kPackedVersion = 1;
inline constexpr std::size_t kPackedGroup = 1024;  // elements
inline constexpr unsigned kPackedEscape = 7;       // the code

struct PackedHeader {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint16_t element_bytes;
  std::uint64_t bytes;        // of the content
  std::uint64_t escapes;      // number of escaped exponents
  std::uint8_t exponents[8];  // by code; the last one is 0
  std::uint8_t tail[8];       // what is left of the content after the last whole element, then zeros
  std::uint8_t reserved[24];  // zeros
};
static_assert(sizeof(PackedHeader) == 64);

struct PackPlan {
  std::uint32_t element_bytes = 0;  // 2 or 4; 0: not worth it
  std::uint8_t exponents[8] = {};   // by code; the last one is 0
  [[nodiscard]] bool worth_it() const { return element_bytes != 0; }
};

// How often each exponent occurs in a sample, read as 16-bit words: in those at even and at odd positions.
struct ExponentSample {
  std::uint32_t even[256];
  std::uint32_t odd[256];
};
// A sample is evenly spread strips, each at a multiple of 16 bytes.
inline constexpr std::size_t kSampleStrips = 64;
inline constexpr std::size_t kSampleStripBytes = 512;

// Content to sample, pack or unpack in device memory.
struct PackItem {
  std::uint64_t address;  // a multiple of 16
  std::uint64_t bytes;
};

// Returns the most that packed content may take to be kept: an eighth less than the content.
[[nodiscard]] constexpr std::size_t packed_limit(std::size_t bytes) { return bytes - bytes / 8; }
// Returns what packed content takes without its escapes.
[[nodiscard]] constexpr std::size_t packed_bytes_without_escapes(std::size_t bytes, std::size_t element_bytes) {
  const std::size_t groups = (bytes / element_bytes + kPackedGroup - 1) / kPackedGroup;
  return sizeof(PackedHeader) + groups * ((element_bytes - 1) * kPackedGroup + 3 * kPackedGroup / 8 + 4);
}

struct PackEstimate {
  PackPlan plan;      // that makes it smallest; none if it would take more than packed_limit()
  std::size_t bytes;  // that it is expected to take, kept as the plan says
};
// Returns the plan by which `bytes` of content, of which this is a sample, take least; none if that is more than
// packed_limit().
[[nodiscard]] PackEstimate plan_packing(const ExponentSample& sample, std::size_t bytes);

// As the functions of a Driver, on memory of this process; addresses need no alignment. Overwrites `sample`.
void sample_on_host(const void* content, std::size_t bytes, ExponentSample& sample);
// Writes at most `capacity` bytes. Returns the packed bytes; 0 if they are more than `capacity`.
[[nodiscard]] std::size_t pack_on_host(const PackPlan& plan, const void* content, std::size_t bytes, void* packed,
                                       std::size_t capacity);
// Unpacks one `part` of `parts`; several threads may each unpack another. Returns false if `packed` is not the packed
// form of `bytes` of content: then the content is undefined, and nothing outside of both was read or written.
[[nodiscard]] bool unpack_on_host(const void* packed, std::size_t packed_bytes, void* content, std::size_t bytes,
                                  std::size_t part = 0, std::size_t parts = 1);

}  // namespace memsaver
