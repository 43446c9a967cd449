#pragma once

#include <map>
#include <string>
#include <vector>

#include "vmm/saver.hpp"

namespace memsaver {

// While no other call is under way: each broken invariant of the saver's account, in words. Compares it with what the
// pools, the file and the devices have handed out (`others`: by device, bytes of other processes).
[[nodiscard]] std::vector<std::string> audit(Saver& saver, const std::map<int, std::size_t>& others = {});

// The ranges at which memory that the driver refused to unmap is still mapped. The saver counts it as released.
[[nodiscard]] std::vector<std::pair<Address, std::size_t>> left_mapped(const Saver& saver);

}  // namespace memsaver
