#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <vector>

#include "backup/block.hpp"
#include "backup/shared_store.hpp"
#include "backup/staging.hpp"

namespace memsaver {

// What one save keeps in the shared store. Processes that save equal content at the same time each write a part of it:
// a process claims no more than it is copying, takes what others have written, and waits for what they are writing.
class SharedSave {
 public:
  SharedSave(Staging& staging, SharedStore& store) : staging_(staging), store_(store) {}
  SharedSave(const SharedSave&) = delete;
  SharedSave& operator=(const SharedSave&) = delete;

  // Looks for the content of a block without host memory. Kept: the block has it now. Claimed: its copy is to be
  // queued, see take() and copied(). Awaited: another process is writing it. No room: the store cannot take it.
  [[nodiscard]] SharedStore::Found find(Block& block, const Digest& digest, std::size_t bytes);
  // Memory for a claimed block; `expected` bytes are still to be saved. False, with the claim given up, if the store
  // does not answer. Throws ErrorKind::out_of_host_memory.
  [[nodiscard]] bool take(Block& block, std::size_t bytes, std::size_t expected);
  // The copy of a claimed block is on the stream of copies.
  void copied(const Block& block, std::size_t packed_bytes);
  // Lets others find what is copied by now.
  void publish_done();
  // Waits until another process has done something since `changes()` was `seen`. All that this one copies is published
  // before. After a second without any progress, the rest of the save waits for nobody.
  void wait_for_others(std::uint32_t seen);
  [[nodiscard]] std::uint32_t changes() const { return store_.changes(); }
  // Gives up what was claimed and not published. No copy may be under way.
  void abandon() noexcept;

 private:
  struct Claim {
    Block* block;
    std::optional<Event> copied;
    std::size_t packed_bytes = 0;
  };
  void wait_for_a_copy();
  void publish(std::size_t index);

  Staging& staging_;
  SharedStore& store_;
  std::vector<Claim> claims_;  // not published
  bool alone_ = false;
  std::optional<std::chrono::steady_clock::time_point> waiting_since_;
};

// Ends a block's use of host memory.
void give_host_memory(Block& block, HostPool& pool, SharedStore* store);

}  // namespace memsaver
