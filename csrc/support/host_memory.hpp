#pragma once

#include "support/sizes.hpp"

namespace memsaver {

[[nodiscard]] std::size_t page_bytes() noexcept;
[[nodiscard]] inline std::size_t to_pages(std::size_t bytes) { return round_up(bytes, page_bytes()); }

// Host memory that is left free for the rest of the process if host memory serves as device memory.
inline constexpr std::size_t kSpareMemory = std::size_t{16} << 20;

// Asks the kernel to put the pages of new memory on a NUMA node (-1: any), or on another one if it is full.
void prefer_node(void* memory, std::size_t bytes, int numa_node) noexcept;

// Returns the memory of this machine, or of this process's control group if less. Throws backup if it cannot be read.
[[nodiscard]] std::size_t machine_memory_bytes();

// Returns the memory that could be allocated now without swapping or reaching the control group's limit. Throws as
// above; errors name `wanted` bytes.
[[nodiscard]] std::size_t available_memory_bytes(std::size_t wanted = 0);

}  // namespace memsaver
