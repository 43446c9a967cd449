#include "support/sizes.hpp"

namespace memsaver {

// A few pages are several blocks, chunks, windows and slices.
const std::size_t kSizeUnit = 512;

}  // namespace memsaver
