#pragma once

#include "vmm/saver.hpp"

namespace memsaver {

// Any thread may call these functions.

// The saver from which torch's allocators allocate. Never destroyed: torch frees memory until the end of the process.
[[nodiscard]] Saver* active_saver() noexcept;
void set_active_saver(Saver* saver) noexcept;

// Makes a call on behalf of C code, which takes no exceptions. Returns the kind of the error, if any; warns of it
// unless that is `expected`.
std::optional<ErrorKind> call_or_warn(ErrorKind expected, const std::function<void()>& call) noexcept;

// Frees memory of `owner`; does nothing in a forked child, which owns none. Returns false, and warns, on failure.
bool free_or_warn(Saver& owner, Address address) noexcept;

// torch's pluggable allocator takes C functions without a user argument, so each set of tag, restore policy and chunk
// size has a separate allocation function. Returns the number of the function memsaver_torch_malloc_<number>; all share
// memsaver_torch_free. Throws configuration if all kAllocators are in use.
inline constexpr int kAllocators = 64;
[[nodiscard]] int allocator_for(const std::string& tag, Restore restore, std::size_t chunk_bytes);

}  // namespace memsaver
