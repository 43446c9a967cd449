#pragma once

#include <cstddef>

namespace memsaver {

// The unit, in bytes, of every size that divides content: slices, blocks, windows, chunks. Tests that run thousands of
// cases link a smaller one (at least 512) in place of sizes.cpp, so that a few pages make many pieces.
extern const std::size_t kSizeUnit;
inline constexpr std::size_t kLargestSizeUnit = 1 << 20;

[[nodiscard]] constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace memsaver
