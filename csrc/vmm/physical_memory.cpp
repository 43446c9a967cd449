#include "vmm/physical_memory.hpp"

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "support/error.hpp"
#include "support/log.hpp"
#include "support/sizes.hpp"

namespace memsaver {

PhysicalMemory::~PhysicalMemory() {
  if (getpid() != process_) return;
  const auto attempt = [](const std::function<void()>& call) {
    try {
      call();
      return true;
    } catch (const std::exception& error) {
      warn(std::string("while giving addresses back: ") + error.what());
      return false;
    }
  };
  orphans_.retry(map_);
  std::vector<Arena*> arenas;
  {
    const Lock lock(map_.mutex);
    arenas = map_.select({});
  }
  for (Arena* const arena : arenas) {
    const int device = arena->key().device;
    bool clear = attempt([&] { orphans_.check_none_mapped(*arena); });
    for (const auto& [address, chunk] : arena->chunks()) {
      Orphans::Orphan orphan{device, chunk.handle, chunk.bytes, chunk.address};
      (void)orphans_.try_give_back(map_, orphan);
      clear = clear && orphan.mapped_at == 0;
    }
    if (!clear) continue;
    for (const auto& [address, bytes] : arena->spans()) {
      attempt([&, begin = address, size = bytes] { driver_.unreserve(device, begin, size + guard_bytes(device)); });
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

std::size_t PhysicalMemory::guard_bytes(int device) const {
  const Lock lock(map_.mutex);
  return map_.info_of(device).granularity;
}

void PhysicalMemory::reserve(Arena& arena, std::size_t bytes) {
  const int device = arena.key().device;
  std::size_t span = 0;
  {
    const Lock lock(map_.mutex);
    const DeviceInfo& info = map_.info_of(device);
    // As large as the device: released allocations keep their addresses, so more may be needed later.
    span = round_up(std::max(bytes, info.total_bytes), info.granularity);
  }
  const Address address = driver_.reserve(device, span + guard_bytes(device));
  const Lock lock(map_.mutex);
  arena.add_span(address, span);
}

Chunk PhysicalMemory::acquire(const Arena::Key& key, Address address, std::size_t bytes, Transaction& transaction) {
  const int device = key.device;
  try {
    const Handle handle = driver_.create(device, bytes);
    const auto mapped_at = std::make_shared<Address>(0);
    transaction.on_rollback([=] { orphans_.give_back(map_, {device, handle, bytes, *mapped_at}); });
    driver_.map(device, address, bytes, handle);
    *mapped_at = address;
    driver_.allow_access(device, address, bytes, peers_of(device));
    return {address, bytes, handle};
  } catch (Error& error) {
    if (error.kind == ErrorKind::out_of_device_memory) {
      try {
        error.with_memory(bytes, driver_.memory_info(device).free_bytes);
      } catch (const Error&) {
        // The first error is the one to report.
      }
    }
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
  const auto attempt = [](const std::function<void()>& call) {
    try {
      call();
      return true;
    } catch (const Error& error) {
      warn(std::string("memory that was freed stays mapped until the next release: ") + error.what());
      return false;
    }
  };
  const bool idle = attempt([&] { driver_.synchronize(device); });
  for (const auto& chunk : chunks) {
    const bool unmapped = idle && attempt([&] { driver_.unmap(device, chunk.address, chunk.bytes); });
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
