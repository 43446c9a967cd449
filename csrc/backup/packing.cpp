#include "backup/packing.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <string>

#include "support/error.hpp"
#include "support/log.hpp"
#include "support/scope_exit.hpp"
#include "support/sizes.hpp"
#include "support/system.hpp"

namespace memsaver {

namespace {

// Warns of a failure that only costs speed. In a handler; a lost context goes on.
void unless_lost(const Error& error, const char* consequence) {
  if (error.kind == ErrorKind::context_lost) throw;
  warn(std::string(consequence) + ": " + error.what());
}

}  // namespace

Packing::~Packing() {
  try {
    close();
    if (address_ != 0 && !mapped_) {
      driver_.unreserve(device_, address_, round_up(kBytes, driver_.device_info(device_).granularity));
    }
    if (shared_ != nullptr) driver_.unregister_host(shared_);
  } catch (const std::exception&) {
    // At process exit the context may be gone.
  }
  if (shared_ != nullptr) munmap(shared_, sizeof(Shared));
}

bool Packing::ready() {
  if (!driver_.has_packing(device_)) return false;
  if (shared_ != nullptr) return true;
  try {
    void* const memory = sys::map_memory(sizeof(Shared), MAP_POPULATE);
    try {
      driver_.register_host(memory, sizeof(Shared));
    } catch (...) {
      munmap(memory, sizeof(Shared));
      throw;
    }
    shared_ = static_cast<Shared*>(memory);
    return true;
  } catch (const Error& error) {
    unless_lost(error, "content is neither packed nor unpacked on the device this time");
    return false;
  }
}

std::vector<PackEstimate> Packing::plan(const std::vector<PackItem>& items, Stream stream) {
  std::vector<PackEstimate> plans;
  for (std::size_t first = 0; first < items.size(); first += kSamples) {
    const std::size_t count = std::min(kSamples, items.size() - first);
    std::copy_n(items.data() + first, count, shared_->items);
    driver_.sample(device_, shared_->items, count, shared_->samples, stream);
    const Event sampled = driver_.record(device_, stream);
    const ScopeExit recycle([&] { driver_.recycle(device_, sampled); });
    driver_.wait(device_, sampled);
    for (std::size_t i = 0; i < count; ++i) {
      plans.push_back(plan_packing(shared_->samples[i], shared_->items[i].bytes));
    }
  }
  return plans;
}

bool Packing::open(std::size_t room) {
  const std::size_t count = std::min(kBuffers, room / kBufferBytes);
  const bool more = buffers_.empty() ? count > 0 : count == kBuffers && buffers_.size() < kBuffers;
  if (!more || refused_) return !buffers_.empty();
  for (auto& buffer : buffers_) wait(buffer);
  buffers_.clear();
  try {
    const std::size_t granularity = driver_.device_info(device_).granularity;
    const std::size_t bytes = round_up(count * kBufferBytes, granularity);
    if (bytes > room || !close_memory()) return false;
    if (address_ == 0) address_ = driver_.reserve(device_, round_up(kBytes, granularity));
    open_memory(bytes);
  } catch (const Error& error) {
    unless_lost(error, "content is not packed on the device this time");
    static_cast<void>(close_memory());
    refused_ = true;
    return false;
  }
  for (std::size_t i = 0; i < count; ++i) {
    buffers_.push_back({address_ + i * kBufferBytes, &shared_->results[i], std::nullopt});
  }
  next_ = 0;
  return true;
}

void Packing::borrow(Address address, std::size_t bytes) {
  for (; bytes >= kBufferBytes && buffers_.size() < kBuffers; address += kBufferBytes, bytes -= kBufferBytes) {
    buffers_.push_back({address, &shared_->results[buffers_.size()], std::nullopt});
  }
  next_ = 0;
}

void Packing::open_memory(std::size_t bytes) {
  handle_ = driver_.create(device_, bytes);
  bytes_ = bytes;
  driver_.map(device_, address_, bytes_, *handle_);
  mapped_ = true;
  driver_.allow_access(device_, address_, bytes_, {});
}

bool Packing::close_memory() {
  try {
    if (mapped_) driver_.unmap(device_, address_, bytes_);
    mapped_ = false;
    if (handle_) driver_.release(device_, *handle_, bytes_);
    handle_.reset();
    return true;
  } catch (const Error& error) {
    unless_lost(error, "memory for packing is given back by the next operation");
    return false;
  }
}

Packing::Buffer& Packing::take() {
  Buffer& buffer = buffers_[next_];
  next_ = (next_ + 1) % buffers_.size();
  wait(buffer);
  return buffer;
}

void Packing::wait(Buffer& buffer) {
  if (!buffer.in_use) return;
  driver_.wait(device_, *buffer.in_use);
  driver_.recycle(device_, *buffer.in_use);
  buffer.in_use.reset();
}

void Packing::use(Buffer& buffer, Stream stream) {
  const Event event = driver_.record(device_, stream);
  if (buffer.in_use) driver_.recycle(device_, *buffer.in_use);
  buffer.in_use = event;
}

void Packing::close() {
  for (const auto& buffer : buffers_) {
    if (buffer.in_use) driver_.recycle(device_, *buffer.in_use);
  }
  buffers_.clear();
  refused_ = false;
  static_cast<void>(close_memory());
}

}  // namespace memsaver
