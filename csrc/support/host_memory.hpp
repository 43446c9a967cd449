#pragma once

#include <cstddef>

#include "support/sizes.hpp"

namespace memsaver {

[[nodiscard]] std::size_t page_bytes() noexcept;
[[nodiscard]] inline std::size_t to_pages(std::size_t bytes) { return round_up(bytes, page_bytes()); }

// What is left free of host memory where it serves as device memory, for all else that the process needs.
inline constexpr std::size_t kSpareMemory = std::size_t{16} << 20;

// Asks the kernel to put the pages of new memory on a NUMA node, or on another one rather than to fail. -1: anywhere.
void prefer_node(void* memory, std::size_t bytes, int numa_node) noexcept;

// Both throw ErrorKind::backup if a limit cannot be read for lack of descriptors or memory.

// Memory of this machine, or of this process's control group if that has less.
[[nodiscard]] std::size_t machine_memory_bytes();

// Memory that could be allocated now without swapping or reaching the control group's limit. Errors name `wanted`.
[[nodiscard]] std::size_t available_memory_bytes(std::size_t wanted = 0);

}  // namespace memsaver
