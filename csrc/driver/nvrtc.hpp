#pragma once

#include <string>

namespace memsaver::cuda {

// Sets the path of the NVRTC library in torch's packages. It is tried first.
void set_nvrtc_path(const std::string& path);

// Machine code of CUDA C++ `source` for `architecture` ("sm_90"). Cached in the user's cache folder ($XDG_CACHE_HOME or
// ~/.cache, below memsaver/), in a file that begins with `name`, keyed by source, architecture and compiler.
// Throws ErrorKind::configuration if NVRTC is missing or rejects the source.
// Throws also once end_compiling() was called.
[[nodiscard]] std::string compile(const std::string& name, const std::string& source, const std::string& architecture);

// The process is ending: waits until nothing is compiled (up to two seconds), and nothing is from then on.
void end_compiling() noexcept;

}  // namespace memsaver::cuda
