#pragma once

#include <cstddef>
#include <vector>

#include "backup/block.hpp"

namespace memsaver {

// Content of consecutive memory as it lies in backups in host memory, for reading it without a resume.
class KeptContent {
 public:
  // Appends [begin, end) of a block that is kept in host memory or as zeros, counted from the start of its allocation.
  void add(const Block& block, std::size_t begin, std::size_t end);
  // Its address, if it is in one piece and not zeros; else null.
  [[nodiscard]] const void* memory() const { return pieces_.size() == 1 ? pieces_.front().memory : nullptr; }
  // Writes all of it to `to`, several threads side by side.
  void copy_to(void* to) const;

 private:
  struct Piece {
    const char* memory;  // null: zeros
    std::size_t bytes;
  };
  void append(const char* memory, std::size_t bytes);

  std::vector<Piece> pieces_;
};

}  // namespace memsaver
