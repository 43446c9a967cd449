#pragma once

#include <string>

namespace memsaver::cuda {

// Names the NVRTC library that torch brings along; used where the dynamic linker does not find one by itself.
void set_nvrtc_path(const std::string& path);

// Machine code of CUDA C++ `source` for `architecture` ("sm_90"). Compiled once, then kept in the user's cache folder
// (XDG_CACHE_HOME, else ~/.cache, below memsaver/) under a name made of source, architecture and compiler.
// Throws ErrorKind::configuration where NVRTC is missing or refuses the source.
[[nodiscard]] std::string compile(const std::string& source, const std::string& architecture);

}  // namespace memsaver::cuda
