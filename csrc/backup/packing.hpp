#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "backup/block.hpp"
#include "driver/handles.hpp"
#include "support/packing.hpp"

namespace memsaver {

// Owns the buffers of device memory in which content of one device is packed and unpacked. They exist only while an
// operation runs, taken from the driver or borrowed; what the driver does not take back, the next close() gives back.
// One thread at a time. Without buffers content is only copied more slowly, so functions throw context_lost, and only
// warn of other driver errors.
class Packing {
 public:
  // With fewer buffers the link waits for kernels; more bring nothing. 168 MiB in all.
  static constexpr std::size_t kBuffers = 6;
  static constexpr std::size_t kBufferBytes = packed_limit(kBlockBytes);
  static constexpr std::size_t kBytes = kBuffers * kBufferBytes;
  // Content of this size is packed; below it a kernel costs about as much as the copy.
  static constexpr std::size_t kSmallest = kSizeUnit;

  struct Buffer {
    Address address;
    std::uint64_t* result;  // of the kernel that works on the buffer, in registered host memory
    Recorded in_use;        // the buffer is in use until this event
  };

  Packing(Driver& driver, int device, bool wanted) : driver_(driver), device_(device), wanted_(wanted) {}
  Packing(const Packing&) = delete;
  Packing& operator=(const Packing&) = delete;
  // Only while nothing is under way.
  ~Packing();

  // Returns whether the driver is prepared to pack and unpack. The functions below need that.
  [[nodiscard]] bool ready();
  // Returns whether content is to be packed, and can be.
  [[nodiscard]] bool packs() { return wanted_ && ready(); }
  // Samples content, waits for the samples, and returns how to pack each item. Throws driver errors.
  [[nodiscard]] std::vector<PackEstimate> plan(const std::vector<PackItem>& items, Stream stream);

  // Takes as many buffers as fit into `room` bytes; if there are some, replaces them once there is room for the most.
  // Returns whether there are any; if the driver refuses, there are none until the next close(). Only if nothing but
  // work under way needs what the buffers hold.
  [[nodiscard]] bool open(std::size_t room);
  // Makes buffers of memory that nothing else uses until close(), as many as it has room for and are needed.
  void borrow(Address address, std::size_t bytes);
  [[nodiscard]] std::size_t buffers() const { return buffers_.size(); }
  // Waits for the buffer that was taken longest ago, and returns it. Throws driver errors, as do the next two.
  [[nodiscard]] Buffer& take();
  static void wait(Buffer& buffer);
  // Marks the buffer as in use until what `stream` holds now is done.
  void use(Buffer& buffer, Stream stream) { buffer.in_use = std::make_shared<RecordedEvent>(driver_, device_, stream); }
  // Gives the device memory back. Only while no work on the buffers is under way.
  void close();
  // Returns the bytes of the device's memory that are held.
  [[nodiscard]] std::size_t held_bytes() const { return range_ ? range_->memory_bytes() : 0; }

 private:
  static constexpr std::size_t kSamples = 32;  // at once
  struct Shared {
    std::uint64_t results[kBuffers];
    PackItem items[kSamples];
    ExponentSample samples[kSamples];
  };

  // Returns whether all memory is given back.
  [[nodiscard]] bool close_memory();

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
