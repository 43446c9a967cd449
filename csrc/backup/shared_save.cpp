#include "backup/shared_save.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "support/error.hpp"
#include "support/log.hpp"

namespace memsaver {

namespace {

using Clock = std::chrono::steady_clock;

// Enough copies of 0.4 ms to keep the link at work while this thread plans the next window and unmaps what is saved;
// what is claimed beyond is work that no other process can take over.
constexpr std::size_t kClaims = 8;
constexpr std::chrono::seconds kPatience{1};

}  // namespace

SharedStore::Found SharedSave::find(Block& block, const Digest& digest, std::size_t bytes) {
  using Found = SharedStore::Found;
  publish_done();
  while (claims_.size() >= kClaims) wait_for_a_copy();
  store_.settle();
  const SharedStore::Answer answer = store_.want(digest, bytes, alone_);
  if (answer.found == Found::kept || answer.found == Found::claimed) {
    block.shared = answer.entry;
    waiting_since_.reset();
  }
  if (answer.found == Found::kept) {
    block.host = store_.memory_of(answer);
    block.packed_bytes = answer.packed_bytes;
  }
  if (answer.found == Found::claimed) claims_.push_back({&block, std::nullopt});
  return answer.found;
}

bool SharedSave::take(Block& block, std::size_t bytes, std::size_t expected) {
  block.host = store_.take(*block.shared, bytes, expected, staging_.pool().numa_node());
  if (!block.host.empty()) return true;
  claims_.erase(std::find_if(claims_.begin(), claims_.end(), [&](const auto& claim) { return claim.block == &block; }));
  store_.give(*std::exchange(block.shared, std::nullopt));
  return false;
}

void SharedSave::copied(const Block& block, std::size_t packed_bytes) {
  for (auto& claim : claims_) {
    if (claim.block != &block) continue;
    claim.packed_bytes = packed_bytes;
    claim.copied = staging_.driver().record(staging_.device(), staging_.copies());
  }
}

void SharedSave::publish_done() {
  for (std::size_t i = 0; i < claims_.size();) {
    if (claims_[i].copied && staging_.driver().done(staging_.device(), *claims_[i].copied)) {
      publish(i);
    } else {
      ++i;
    }
  }
}

// Copies end in the order in which they were queued: waits for the first of them.
void SharedSave::wait_for_a_copy() {
  const auto first = std::find_if(claims_.begin(), claims_.end(), [](const auto& claim) { return claim.copied; });
  if (first == claims_.end()) return;
  staging_.driver().wait(staging_.device(), *first->copied);
  publish(static_cast<std::size_t>(first - claims_.begin()));
}

void SharedSave::publish(std::size_t index) {
  const Claim claim = claims_[index];
  claims_.erase(claims_.begin() + static_cast<std::ptrdiff_t>(index));
  staging_.driver().recycle(staging_.device(), *claim.copied);
  store_.publish(*claim.block->shared, claim.packed_bytes);
}

void SharedSave::wait_for_others(std::uint32_t seen) {
  while (!claims_.empty()) wait_for_a_copy();
  const auto now = Clock::now();
  if (!waiting_since_) waiting_since_ = now;
  alone_ = now - *waiting_since_ > kPatience;
  if (!alone_) store_.wait_for_change(seen);
}

void SharedSave::abandon() noexcept {
  for (const auto& claim : std::exchange(claims_, {})) {
    if (claim.copied) staging_.driver().recycle(staging_.device(), *claim.copied);
    store_.give(*std::exchange(claim.block->shared, std::nullopt));
    claim.block->host.clear();
  }
}

void give_host_memory(Block& block, HostPool& pool, SharedStore* store) {
  std::vector<HostRange> ranges = std::exchange(block.host, {});
  if (block.shared) {
    store->give(*std::exchange(block.shared, std::nullopt));
  } else if (!ranges.empty()) {
    pool.give(ranges);
  }
}

}  // namespace memsaver
