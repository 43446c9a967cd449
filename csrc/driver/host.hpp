#pragma once

#include <memory>
#include <string>

#include "driver/driver.hpp"

namespace memsaver {

// Returns a driver of devices made of host memory: the same semantics on real pages, without a GPU. Each name is one
// device; an empty list is one private device. `capacity_bytes` of 0 is half of the memory of this machine or of its
// control group. Throws configuration.
[[nodiscard]] std::unique_ptr<Driver> open_host_driver(const std::vector<std::string>& names,
                                                       std::size_t capacity_bytes);

}  // namespace memsaver
