#pragma once

#include <cstddef>

#include "support/sizes.hpp"

namespace memsaver {

[[nodiscard]] std::size_t page_bytes() noexcept;
[[nodiscard]] inline std::size_t to_pages(std::size_t bytes) { return round_up(bytes, page_bytes()); }

// Both throw ErrorKind::backup where that cannot be read for want of descriptors or memory.
//
// Memory of this machine, or of the control group that this process runs in where that is less.
[[nodiscard]] std::size_t machine_memory_bytes();

// Memory that could be taken now without swapping or meeting the control group's limit. Errors name the bytes that are
// wanted of it.
[[nodiscard]] std::size_t available_memory_bytes(std::size_t wanted = 0);

}  // namespace memsaver
