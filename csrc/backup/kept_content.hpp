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
  // Its address, if it is in one piece and neither packed nor zeros; else null.
  [[nodiscard]] const void* memory() const { return pieces_.size() == 1 ? pieces_.front().memory : nullptr; }
  // Writes all of it to `to`, several threads side by side. Throws ErrorKind::backup if packed content is damaged.
  void copy_to(void* to) const;

 private:
  struct Piece {
    const char* memory;  // null: zeros, or packed
    std::size_t bytes;
    const Block* packed;  // or null
    std::size_t offset;   // in the content of `packed`
  };
  [[nodiscard]] static bool write(const Piece& piece, char* to);
  void append(const char* memory, std::size_t bytes);

  std::vector<Piece> pieces_;
};

// Unpacks what lies in `memory`, with several threads if `threads` is more than 1. Returns false if it is not packed
// content of `bytes` bytes.
[[nodiscard]] bool unpack_ranges(const std::vector<HostRange>& memory, std::size_t packed_bytes, void* content,
                                 std::size_t bytes, std::size_t threads = 1);

}  // namespace memsaver
