#pragma once

#include <cstddef>

// The unit, in bytes, of every size that divides content: slices, blocks, windows, chunks. Tests that run thousands of
// cases build the core with a smaller one, so that a few pages make many pieces.
#ifndef MEMSAVER_UNIT_BYTES
#define MEMSAVER_UNIT_BYTES (1 << 20)
#endif

namespace memsaver {

inline constexpr std::size_t kSizeUnit = MEMSAVER_UNIT_BYTES;

[[nodiscard]] constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace memsaver
