#include "backup/unpacking.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <utility>

#include "support/packing.hpp"
#include "support/progress.hpp"
#include "support/scope_exit.hpp"
#include "support/system.hpp"

namespace memsaver {

namespace {

constexpr std::size_t kUnpackers = 8;
constexpr std::size_t kLeastEach = std::size_t{1} << 20;  // for less a thread is not worth its start

}  // namespace

Unpacking::~Unpacking() { staging_.pool().give(bounce_, HostPool::Use::passing); }

void Unpacking::bring(const ContentBlock& content, const std::vector<HostRange>& memory) {
  Packing& packing = staging_.packing();
  if (packing.buffers() == 0) return unpack_on_host(content, memory);
  Driver& driver = staging_.driver();
  const int device = staging_.device();
  const std::size_t packed_bytes = content.block->packed_bytes;
  const Extent& extent = content.block->extents.front();
  if (blocks_.size() == packing.buffers()) end_oldest();
  Packing::Buffer& buffer = packing.take();
  staging_.copy(Staging::Direction::to_device, buffer.address, {{0, packed_bytes}}, memory);
  {
    const Event copied = driver.record(device, staging_.copies());
    const ScopeExit recycle([&] { driver.recycle(device, copied); });
    driver.stream_wait(device, staging_.kernels(), copied);
  }
  *buffer.result = 0;
  driver.unpack(device, {buffer.address, packed_bytes}, {content.base + extent.offset, extent.bytes}, buffer.result,
                staging_.kernels());
  packing.use(buffer, staging_.kernels());
  blocks_.push_back({&content, &buffer});
}

void Unpacking::end_oldest() {
  const auto [content, buffer] = blocks_.front();
  blocks_.pop_front();
  {
    const Stopwatch watch(seconds_.copy);
    staging_.packing().wait(*buffer);
  }
  if (*buffer->result != 0) throw damaged_backup(*content, "what was kept is not packed content");
}

void Unpacking::end() {
  while (!blocks_.empty()) end_oldest();
  staging_.packing().close();
}

void Unpacking::unpack_on_host(const ContentBlock& content, const std::vector<HostRange>& memory) {
  const std::size_t bytes = content.block->content_bytes();
  if (unpacked_.size() < bytes) unpacked_.resize(bytes);
  const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t threads = std::min({kUnpackers, cores, bytes / kLeastEach + 1});
  if (!unpack_ranges(memory, content.block->packed_bytes, unpacked_.data(), bytes, threads)) {
    throw damaged_backup(content, "what was kept is not packed content");
  }
  bounce_ = staging_.pool().take(bytes, HostPool::Use::must_pass);
  std::size_t at = 0;
  for (const auto& range : bounce_) {
    const std::size_t part = std::min(range.bytes, bytes - at);
    std::memcpy(reinterpret_cast<void*>(range.address), unpacked_.data() + at, part);
    at += part;
  }
  staging_.copy(Staging::Direction::to_device, content.base, content.block->extents, bounce_);
  staging_.wait_for(staging_.copies());
  staging_.pool().give(std::exchange(bounce_, {}), HostPool::Use::passing);
}

bool unpack_ranges(const std::vector<HostRange>& memory, std::size_t packed_bytes, void* content, std::size_t bytes,
                   std::size_t threads) {
  const auto* packed = reinterpret_cast<const unsigned char*>(memory.front().address);
  std::vector<unsigned char> joined;
  if (memory.front().bytes < packed_bytes) {
    for (const auto& range : memory) {
      const auto* const data = reinterpret_cast<const unsigned char*>(range.address);
      joined.insert(joined.end(), data, data + range.bytes);
    }
    packed = joined.data();
  }
  std::atomic<bool> sound{true};
  sys::run_in_threads(threads, [&](std::size_t part) {
    if (!unpack_on_host(packed, packed_bytes, content, bytes, part, threads)) sound = false;
  });
  return sound;
}

void note_damage(const ContentBlock& content, Error& error) {
  content.block->damaged = true;
  error.with_advice(
      "the memory stays released; repeat, or give this content up: release the tag with restore 'discard', resume it, "
      "and load the content anew");
}

Error damaged_backup(const ContentBlock& content, const char* what) {
  Error error(ErrorKind::backup, what);
  note_damage(content, error);
  error.with_tag(content.tag).with_address(content.begin()).with_bytes(content.block->bytes);
  return error;
}

}  // namespace memsaver
