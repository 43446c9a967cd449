#include "backup/kept_content.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "support/system.hpp"

namespace memsaver {

void KeptContent::append(const char* memory, std::size_t bytes) {
  if (bytes == 0) return;
  if (memory != nullptr && !pieces_.empty() && pieces_.back().memory != nullptr &&
      pieces_.back().memory + pieces_.back().bytes == memory) {
    pieces_.back().bytes += bytes;
  } else {
    pieces_.push_back({memory, bytes});
  }
}

void KeptContent::add(const Block& block, std::size_t begin, std::size_t end) {
  if (block.kept == Kept::zero) return append(nullptr, end - begin);
  // The extents lie packed in the block's host memory; what is between them was dead and reads as zeros.
  std::size_t at = begin;
  for_each_piece(block.extents, block.host, [&](std::size_t offset, std::uintptr_t memory, std::size_t bytes) {
    const std::size_t from = std::max(begin, offset);
    const std::size_t to = std::min(end, offset + bytes);
    if (from >= to) return;
    append(nullptr, from - at);
    append(reinterpret_cast<const char*>(memory + (from - offset)), to - from);
    at = to;
  });
  append(nullptr, end - at);
}

// One thread alone, which also touches the new memory, copied 4.2 GiB at 1.6 GB/s on a host with 16 cores.
void KeptContent::copy_to(void* to) const {
  constexpr std::size_t kThreads = 8;
  std::atomic<std::size_t> next{0};
  const auto work = [this, &next, to] {
    char* at = static_cast<char*>(to);
    std::size_t passed = 0;
    for (std::size_t mine = next++; mine < pieces_.size(); mine = next++) {
      for (; passed < mine; ++passed) at += pieces_[passed].bytes;
      const Piece& piece = pieces_[mine];
      if (piece.memory == nullptr) {
        std::memset(at, 0, piece.bytes);
      } else {
        std::memcpy(at, piece.memory, piece.bytes);
      }
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  while (threads.size() + 1 < std::min(kThreads, pieces_.size())) {
    auto thread = sys::start_thread(work);
    if (!thread) break;
    threads.push_back(std::move(*thread));
  }
  work();
  for (auto& thread : threads) thread.join();
}

}  // namespace memsaver
