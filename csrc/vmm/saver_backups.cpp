// What callers may see and drop of the backups between operations.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "support/system.hpp"
#include "vmm/saver.hpp"

namespace memsaver {

namespace {

// A part of kept content; null memory stands for zeros.
struct Piece {
  const char* memory;
  std::size_t bytes;
};

// Adds the content of [begin, end) of a block, counted from the start of its allocation, of which extents lie packed in
// its host memory.
void add_pieces(const Block& block, std::size_t begin, std::size_t end, std::vector<Piece>& pieces) {
  if (block.kept == Kept::zero) {
    pieces.push_back({nullptr, end - begin});
    return;
  }
  std::size_t at = begin;
  auto part = block.host.begin();
  std::size_t used = 0;
  for (const auto& extent : block.extents) {
    std::size_t done = 0;
    while (done < extent.bytes) {
      if (used == part->bytes) {
        ++part;
        used = 0;
      }
      const std::size_t bytes = std::min(extent.bytes - done, part->bytes - used);
      const std::size_t from = std::max(begin, extent.offset + done);
      const std::size_t to = std::min(end, extent.offset + done + bytes);
      if (from < to) {
        if (at < from) pieces.push_back({nullptr, from - at});
        const auto* const memory = reinterpret_cast<const char*>(part->address + used + (from - extent.offset - done));
        if (!pieces.empty() && pieces.back().memory != nullptr &&
            pieces.back().memory + pieces.back().bytes == memory) {
          pieces.back().bytes += to - from;
        } else {
          pieces.push_back({memory, to - from});
        }
        at = to;
      }
      done += bytes;
      used += bytes;
    }
  }
  if (at < end) pieces.push_back({nullptr, end - at});
}

// Writes what `pieces` hold to `to`, one after the other. Several threads side by side: one alone, which also touches
// the new memory, copied 4.2 GiB at 1.6 GB/s on a host with 16 cores.
void copy_out(const std::vector<Piece>& pieces, char* to) {
  constexpr std::size_t kThreads = 8;
  std::atomic<std::size_t> next{0};
  const auto work = [&pieces, &next, to] {
    char* at = to;
    std::size_t passed = 0;
    for (std::size_t mine = next++; mine < pieces.size(); mine = next++) {
      for (; passed < mine; ++passed) at += pieces[passed].bytes;
      const Piece& piece = pieces[mine];
      if (piece.memory == nullptr) {
        std::memset(at, 0, piece.bytes);
      } else {
        std::memcpy(at, piece.memory, piece.bytes);
      }
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  while (threads.size() + 1 < std::min(kThreads, pieces.size())) {
    auto thread = sys::start_thread(work);
    if (!thread) break;
    threads.push_back(std::move(*thread));
  }
  work();
  for (auto& thread : threads) thread.join();
}

}  // namespace

// Only with mutex_ held.
const Allocation* Saver::allocation_around(const Arena* arena, Address address, std::size_t bytes) const {
  if (arena == nullptr) return nullptr;
  auto found = arena->allocations().upper_bound(address);
  if (found == arena->allocations().begin()) return nullptr;
  const Allocation& allocation = (--found)->second;
  return address + bytes <= allocation.address + allocation.bytes ? &allocation : nullptr;
}

BackupView Saver::backup_of(Address address, std::size_t bytes, void* to) {
  check_process();
  const std::lock_guard<std::mutex> operation(operation_mutex_);
  BackupView view;
  std::vector<Piece> pieces;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const Arena* const arena = arena_of(address);
    const Allocation* const allocation = allocation_around(arena, address, bytes);
    if (allocation == nullptr) {
      throw Error(ErrorKind::configuration, "this is not memory of a region").with_address(address).with_bytes(bytes);
    }
    view.tag = arena->key().tag;
    view.released = !arena->is_mapped(address, bytes);
    const std::size_t begin = address - allocation->address;
    const std::size_t end = begin + bytes;
    view.kept = allocation->blocks.empty() ? Kept::nothing : Kept::host;
    for (const auto& block : allocation->blocks) {
      const std::size_t from = std::max(begin, block.offset);
      const std::size_t until = std::min(end, block.offset + block.bytes);
      if (from >= until) continue;
      if (block.kept == Kept::nothing || block.kept == Kept::file) {
        view.kept = block.kept;
        return view;
      }
      add_pieces(block, from, until, pieces);
    }
  }
  if (view.kept != Kept::host) return view;
  if (pieces.size() == 1) view.memory = pieces.front().memory;
  // Nothing else writes to or frees backups while the operation lock is held.
  if (to != nullptr) copy_out(pieces, static_cast<char*>(to));
  return view;
}

void Saver::drop_backups(const Tags& tags) {
  check_process();
  const std::lock_guard<std::mutex> operation(operation_mutex_);
  drop_backups_now(tags);
  trim_later(false);
}

// Only with operation_mutex_ held.
void Saver::drop_backups_now(const Tags& tags) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [key, arena] : arenas_) {
    if (!selected(tags, key.tag)) continue;
    for (auto& [address, allocation] : arena->allocations()) {
      if (!arena->is_mapped(address, allocation.bytes)) continue;
      for (auto& block : allocation.blocks) give_backup_back(block, key.device);
    }
  }
}

void Saver::set_file_folder(const std::string& folder) {
  check_process();
  const std::lock_guard<std::mutex> operation(operation_mutex_);
  if (!files_.move_to(folder)) {
    drop_backups_now({});
    if (!files_.move_to(folder)) {
      throw Error(ErrorKind::configuration,
                  "the folder for backup files cannot change while backups lie in the old one")
          .with_bytes(files_.used_bytes())
          .with_advice("resume what is released first");
    }
  }
}

}  // namespace memsaver
