#include "backup/packing.hpp"

#include <algorithm>
#include <string>

#include "support/error.hpp"
#include "support/log.hpp"
#include "support/sizes.hpp"

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
  } catch (const std::exception&) {
    // At process exit the context may be gone.
  }
}

bool Packing::ready() {
  if (!driver_.has_packing(device_)) return false;
  try {
    if (!shared_) shared_ = std::make_unique<Registered<Shared>>(driver_);
    return true;
  } catch (const Error& error) {
    unless_lost(error, "content is neither packed nor unpacked on the device this time");
    return false;
  }
}

std::vector<PackEstimate> Packing::plan(const std::vector<PackItem>& items, Stream stream) {
  std::vector<PackEstimate> plans;
  Shared& shared = **shared_;
  for (std::size_t first = 0; first < items.size(); first += kSamples) {
    const std::size_t count = std::min(kSamples, items.size() - first);
    std::copy_n(items.data() + first, count, shared.items);
    driver_.sample(device_, shared.items, count, shared.samples, stream);
    RecordedEvent(driver_, device_, stream).wait();
    for (std::size_t i = 0; i < count; ++i) plans.push_back(plan_packing(shared.samples[i], shared.items[i].bytes));
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
    if (!range_) range_.emplace(driver_, device_, round_up(kBytes, granularity));
    range_->map(bytes, [&] { return driver_.create(device_, bytes); });
  } catch (const Error& error) {
    unless_lost(error, "content is not packed on the device this time");
    static_cast<void>(close_memory());
    refused_ = true;
    return false;
  }
  borrow(range_->address(), count * kBufferBytes);
  return true;
}

void Packing::borrow(Address address, std::size_t bytes) {
  for (; bytes >= kBufferBytes && buffers_.size() < kBuffers; address += kBufferBytes, bytes -= kBufferBytes) {
    buffers_.push_back({address, &(*shared_)->results[buffers_.size()], {}});
  }
  next_ = 0;
}

bool Packing::close_memory() {
  try {
    if (range_) range_->unmap();
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
  if (buffer.in_use) buffer.in_use->wait();
  buffer.in_use.reset();
}

void Packing::close() {
  buffers_.clear();
  refused_ = false;
  static_cast<void>(close_memory());
}

}  // namespace memsaver
