#include "support/sizes.hpp"

namespace memsaver {

const std::size_t kSizeUnit = kLargestSizeUnit;

}  // namespace memsaver
