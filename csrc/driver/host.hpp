#pragma once

#include <memory>
#include <string>

#include "driver/driver.hpp"

namespace memsaver {

// A device made of host memory: the same semantics without a GPU, on real pages. Each name is one device; an empty
// list is one private device. `capacity_bytes` of 0 means half of what this machine (or its control group) has.
[[nodiscard]] std::unique_ptr<Driver> open_host_driver(const std::vector<std::string>& names,
                                                       std::size_t capacity_bytes);

}  // namespace memsaver
