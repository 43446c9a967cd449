#pragma once

#include <string>

#include "vmm/saver.hpp"

namespace memsaver {

// The saver that the C functions below serve. It is never destroyed: torch frees memory until the very end of a
// process.
[[nodiscard]] Saver* active_saver() noexcept;
void set_active_saver(Saver* saver) noexcept;

// torch's pluggable allocator takes bare C functions, without an argument of the caller's. So there is one allocation
// function for each pair of tag and policy: this returns the number of the one for `tag` and `restore`, whose name is
// memsaver_torch_malloc_<number>. All share memsaver_torch_free.
// Throws ErrorKind::configuration where all kAllocators are taken.
inline constexpr int kAllocators = 64;
[[nodiscard]] int allocator_for(const std::string& tag, Restore restore);

// What the last allocation in this thread that gave torch a null pointer failed with, and forgets it.
[[nodiscard]] std::string take_allocation_failure();

}  // namespace memsaver
