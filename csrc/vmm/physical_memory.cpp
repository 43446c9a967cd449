#include "vmm/physical_memory.hpp"

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "support/log.hpp"
#include "support/sizes.hpp"

namespace memsaver {

namespace {

// Makes a call whose failure is only logged, after `what`; returns whether it succeeded.
bool attempt(const char* what, const std::function<void()>& call) {
  try {
    call();
    return true;
  } catch (const std::exception& error) {
    warn(std::string(what) + ": " + error.what());
    return false;
  }
}

}  // namespace

void add_free_memory(Error& error, Driver& driver, int device, std::size_t bytes) {
  if (error.kind != ErrorKind::out_of_device_memory || error.needed_bytes != 0) return;
  try {
    error.with_memory(bytes, driver.memory_info(device).free_bytes);
  } catch (const Error&) {
    // The first error is the one to report.
  }
}

PhysicalMemory::~PhysicalMemory() {
  if (getpid() != process_) return;
  constexpr char what[] = "while giving addresses back";
  orphans_.retry(map_);
  for (const Arena* const arena : map_.select({})) {
    const int device = arena->key().device;
    bool clear = attempt(what, [&] {
      const Lock lock(map_.mutex);
      orphans_.check_none_mapped(map_, *arena);
    });
    for (const auto& [address, chunk] : arena->chunks()) {
      Orphans::Orphan orphan{device, chunk.handle, chunk.bytes, chunk.address};
      (void)orphans_.try_give_back(map_, orphan);
      clear = clear && orphan.mapped_at == 0;
    }
    if (!clear) continue;
    const std::size_t guard = map_.info_of(device).granularity;
    for (const auto& span : arena->spans()) {
      attempt(what, [&] { driver_.unreserve(device, span.first, span.second + guard); });
    }
  }
}

std::vector<int> PhysicalMemory::peers_of(int device) {
  std::vector<int> peers;
  if (!peer_access_) return peers;
  for (int peer = 0; peer < driver_.device_count(); ++peer) {
    if (peer != device) peers.push_back(peer);
  }
  return peers;
}

void PhysicalMemory::reserve(Arena& arena, std::size_t bytes, const DeviceInfo& info) {
  const int device = arena.key().device;
  // As large as the device: released allocations keep their addresses, so more may be needed later. The unused end
  // keeps neighbouring spans apart: nothing may lie in two reservations.
  const std::size_t span = round_up(std::max(bytes, info.total_bytes), info.granularity);
  const Address address = driver_.reserve(device, span + info.granularity);
  const Lock lock(map_.mutex);
  arena.add_span(address, span);
}

Chunk PhysicalMemory::acquire(const Arena::Key& key, Address address, std::size_t bytes, Transaction& transaction,
                              std::optional<Handle> reserved) {
  const int device = key.device;
  try {
    const Handle handle = reserved ? *reserved : driver_.create(device, bytes);
    const auto mapped_at = std::make_shared<Address>(0);
    transaction.on_rollback([=] { orphans_.give_back(map_, {device, handle, bytes, *mapped_at}); });
    driver_.map(device, address, bytes, handle);
    *mapped_at = address;
    driver_.allow_access(device, address, bytes, peers_of(device));
    return {address, bytes, handle};
  } catch (Error& error) {
    add_free_memory(error, driver_, device, bytes);
    throw error.with_tag(key.tag).with_device(device).with_bytes(bytes);
  }
}

void PhysicalMemory::drop(Arena& arena, const Chunk& chunk, Restore restore) {
  const int device = arena.key().device;
  try {
    driver_.unmap(device, chunk.address, chunk.bytes);
    {
      const Lock lock(map_.mutex);
      arena.drop_chunk(chunk.address, restore);
    }
    try {
      driver_.release(device, chunk.handle, chunk.bytes);
    } catch (...) {
      orphans_.add({device, chunk.handle, chunk.bytes});
      throw;
    }
  } catch (Error& error) {
    throw error.with_tag(arena.key().tag).with_device(device).with_bytes(chunk.bytes);
  }
}

void PhysicalMemory::give_back(Arena& arena, const std::vector<Chunk>& chunks) {
  if (chunks.empty()) return;
  const int device = arena.key().device;
  constexpr char what[] = "memory that was freed stays mapped until the next release";
  const bool idle = attempt(what, [&] { driver_.synchronize(device); });
  for (const auto& chunk : chunks) {
    const bool unmapped = idle && attempt(what, [&] { driver_.unmap(device, chunk.address, chunk.bytes); });
    if (unmapped) orphans_.give_back(map_, {device, chunk.handle, chunk.bytes});
    const Lock lock(map_.mutex);
    if (unmapped) {
      arena.reclaim(chunk.address, chunk.bytes);
    } else {
      arena.keep_chunk(chunk);
    }
  }
}

}  // namespace memsaver
