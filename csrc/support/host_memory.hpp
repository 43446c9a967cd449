#pragma once

#include <cstddef>

namespace memsaver {

[[nodiscard]] std::size_t page_bytes() noexcept;

// Memory of this machine, or of the control group that this process runs in where that is less.
[[nodiscard]] std::size_t machine_memory_bytes();

// Memory that could be taken now without swapping or meeting the control group's limit.
[[nodiscard]] std::size_t available_memory_bytes();

}  // namespace memsaver
