#pragma once

#include <cstddef>
#include <vector>

#include "backup/block.hpp"

namespace memsaver {

// The content of consecutive memory as it lies in backups in host memory, to be read without a resume. Owns none of it:
// the blocks must stay as they are. One thread at a time.
class KeptContent {
 public:
  // Appends [begin, end) of a block that is kept in host memory or as zeros, counted from the start of its allocation.
  void add(const Block& block, std::size_t begin, std::size_t end);
  // Returns its address if it is in one piece and neither packed nor zeros; else null.
  [[nodiscard]] const void* memory() const { return pieces_.size() == 1 ? pieces_.front().memory : nullptr; }
  // Writes all of it to `to`, with several threads. Throws backup if packed content is damaged: `to` is undefined.
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

// Unpacks the `packed_bytes` in `memory` with so many threads. Returns false if they are not packed content of `bytes`:
// then `content` is undefined.
[[nodiscard]] bool unpack_ranges(const std::vector<HostRange>& memory, std::size_t packed_bytes, void* content,
                                 std::size_t bytes, std::size_t threads = 1);

}  // namespace memsaver
