#pragma once

#include "backup/block.hpp"
#include "driver/handles.hpp"

namespace memsaver {

// Owns the buffers in device memory in which content is packed and unpacked while an operation runs, taken from the
// driver or borrowed. What the driver does not take back, the next close() gives back. One thread at a time. Without
// buffers copies are only slower, so functions throw context_lost, and only log other driver errors.
class Packing {
 public:
  // With fewer buffers the link waits for kernels; more bring nothing. 168 MiB in all.
  static constexpr std::size_t kBuffers = 6;
  inline static const std::size_t kBufferBytes = packed_limit(kBlockBytes);
  inline static const std::size_t kBytes = kBuffers * kBufferBytes;
  // The smallest content that is packed; below this size a kernel costs about as much as the copy.
  inline static const std::size_t kSmallest = kSizeUnit;

  struct Buffer {
    Address address;
    std::uint64_t* result;  // of the kernel that works on the buffer, in registered host memory
    Recorded in_use;        // the buffer is in use until this event
  };

  Packing(Driver& driver, int device, bool wanted) : driver_(driver), device_(device), wanted_(wanted) {}

  // Returns whether the driver is prepared to pack and unpack, which the functions below require.
  [[nodiscard]] bool ready() {
    return driver_.has_packing(device_) &&
           attempt_unless_lost("content is neither packed nor unpacked on the device this time", [this] {
             if (!shared_) shared_ = std::make_unique<Registered<Shared>>(driver_);
           });
  }
  [[nodiscard]] bool packs() { return wanted_ && ready(); }
  // Samples content, waits for the samples, and returns how to pack each item. Throws driver errors.
  [[nodiscard]] std::vector<PackEstimate> plan(const std::vector<PackItem>& items, Stream stream) {
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

  // Makes as many buffers as fit into `room` bytes; replaces existing ones only by all kBuffers. Returns whether there
  // are any; once the driver refuses, there are none until close(). Waits for the work on the buffers that it replaces;
  // their content is lost.
  [[nodiscard]] bool open(std::size_t room) {
    const std::size_t count = std::min(kBuffers, room / kBufferBytes);
    const bool more = buffers_.empty() ? count > 0 : count == kBuffers && buffers_.size() < kBuffers;
    if (!more || refused_) return !buffers_.empty();
    for (auto& buffer : buffers_) wait(buffer);
    buffers_.clear();
    refused_ = !attempt_unless_lost("content is neither packed nor unpacked on the device this time", [&] {
      const std::size_t granularity = driver_.device_info(device_).granularity;
      const std::size_t bytes = round_up(count * kBufferBytes, granularity);
      if (bytes > room || !close_memory()) return;
      if (!range_) range_.emplace(driver_, device_, round_up(kBytes, granularity));
      range_->map(bytes, [&] { return driver_.create(device_, bytes); });
      borrow(range_->address(), count * kBufferBytes);
    });
    if (refused_) static_cast<void>(close_memory());
    return !buffers_.empty();
  }
  // Makes buffers of memory that nothing else uses until close(), as many as it has room for and are needed.
  void borrow(Address address, std::size_t bytes) {
    for (; bytes >= kBufferBytes && buffers_.size() < kBuffers; address += kBufferBytes, bytes -= kBufferBytes) {
      buffers_.push_back({address, &(*shared_)->results[buffers_.size()], {}});
    }
    next_ = 0;
  }
  [[nodiscard]] std::size_t buffers() const { return buffers_.size(); }
  // Waits for the buffer that was taken longest ago, and returns it. Throws driver errors, as do the next two.
  [[nodiscard]] Buffer& take() {
    Buffer& buffer = buffers_[next_];
    next_ = (next_ + 1) % buffers_.size();
    wait(buffer);
    return buffer;
  }
  static void wait(Buffer& buffer) {
    if (buffer.in_use) buffer.in_use->wait();
    buffer.in_use.reset();
  }
  // Marks the buffer as in use until what `stream` holds now is done.
  void use(Buffer& buffer, Stream stream) { buffer.in_use = std::make_shared<RecordedEvent>(driver_, device_, stream); }
  // Gives the device memory back. Only while no work on the buffers is under way.
  void close() {
    buffers_.clear();
    refused_ = false;
    static_cast<void>(close_memory());
  }
  [[nodiscard]] std::size_t held_bytes() const { return range_ ? range_->memory_bytes() : 0; }

 private:
  static constexpr std::size_t kSamples = 32;  // at once
  struct Shared {
    std::uint64_t results[kBuffers];
    PackItem items[kSamples];
    ExponentSample samples[kSamples];
  };

  // Returns whether all memory is given back.
  [[nodiscard]] bool close_memory() {
    return attempt_unless_lost("memory for packing is given back by the next operation", [this] {
      if (range_) range_->unmap();
    });
  }

  Driver& driver_;
  const int device_;
  const bool wanted_;
  std::unique_ptr<Registered<Shared>> shared_;
  std::optional<DeviceRange> range_;  // addresses for all buffers
  bool refused_ = false;
  std::vector<Buffer> buffers_;
  std::size_t next_ = 0;
};

}  // namespace memsaver
