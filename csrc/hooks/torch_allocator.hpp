#pragma once

#include <string>

#include "vmm/saver.hpp"

namespace memsaver {

// The saver that the C functions below allocate from. It must never be destroyed: torch frees memory until the very end
// of the process.
[[nodiscard]] Saver* active_saver() noexcept;
void set_active_saver(Saver* saver) noexcept;

// Frees memory of `owner`. On failure warns and returns false. In a forked child, which owns none of the device memory,
// there is nothing to free.
bool free_or_warn(Saver& owner, Address address) noexcept;

// torch's pluggable allocator takes C functions without a user argument, so each pair of tag and restore policy has an
// allocation function of its own. Returns the number of that for `tag` and `restore`, memsaver_torch_malloc_<number>;
// all share memsaver_torch_free. Throws ErrorKind::configuration if all kAllocators are in use.
inline constexpr int kAllocators = 64;
[[nodiscard]] int allocator_for(const std::string& tag, Restore restore);

// Returns and clears the message of this thread's last failed allocation.
[[nodiscard]] std::string take_allocation_failure();

}  // namespace memsaver
