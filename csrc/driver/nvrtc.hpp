#pragma once

#include <string>

namespace memsaver::cuda {

// Any thread may call these functions.

// Sets the path of the NVRTC library in torch's packages, which is tried first.
void set_nvrtc_path(const std::string& path);

// Returns machine code of CUDA C++ `source` for `architecture` ("sm_90"). Cached in the user's cache folder
// ($XDG_CACHE_HOME or ~/.cache, below memsaver/), in a file that begins with `name`, keyed by source, architecture and
// compiler. Throws configuration if NVRTC is missing or rejects the source, and after end_compiling().
[[nodiscard]] std::string compile(const std::string& name, const std::string& source, const std::string& architecture);

// For the end of the process: waits for what is being compiled, and lets nothing be compiled later.
void end_compiling() noexcept;

}  // namespace memsaver::cuda
