#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "backup/block.hpp"
#include "backup/handles.hpp"
#include "support/packing.hpp"

namespace memsaver {

// Packs and unpacks content of one device, in buffers of device memory that exist only while an operation runs: taken
// from the driver, or borrowed. One thread at a time. Device memory that the driver does not take back is kept, and
// given back by the next close(). Without buffers content is only copied slower, so of the driver's errors only the
// loss of the context is thrown.
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
    Recorded in_use;        // until then
  };

  Packing(Driver& driver, int device, bool wanted) : driver_(driver), device_(device), wanted_(wanted) {}
  Packing(const Packing&) = delete;
  Packing& operator=(const Packing&) = delete;
  // Nothing may be under way.
  ~Packing();

  // Whether the driver is prepared: it can unpack.
  [[nodiscard]] bool ready();
  // Whether content is to be packed, and can be.
  [[nodiscard]] bool packs() { return wanted_ && ready(); }
  // Samples content and says how to pack each item; waits for the samples. Only after ready() returned true.
  [[nodiscard]] std::vector<PackEstimate> plan(const std::vector<PackItem>& items, Stream stream);

  // Takes as many buffers as fit into `room` bytes; if there are some already, all anew, once there is room for the
  // most. Returns whether there are any; if the driver refuses, there are none until the next close(). Only after
  // ready() returned true, and with nothing to be read from the buffers but by work under way.
  [[nodiscard]] bool open(std::size_t room);
  // Makes buffers of memory that nothing else uses until close(), as many as it has room for and are needed. Only after
  // ready() returned true.
  void borrow(Address address, std::size_t bytes);
  [[nodiscard]] std::size_t buffers() const { return buffers_.size(); }
  // The buffer that was taken longest ago, once it is no longer in use.
  [[nodiscard]] Buffer& take();
  static void wait(Buffer& buffer);
  // The buffer is in use until what `stream` holds now is done.
  void use(Buffer& buffer, Stream stream) { buffer.in_use = std::make_shared<RecordedEvent>(driver_, device_, stream); }
  // Gives the device memory back. No work on the buffers may be under way.
  void close();
  // Of the device.
  [[nodiscard]] std::size_t held_bytes() const { return handle_ ? bytes_ : 0; }

 private:
  static constexpr std::size_t kSamples = 32;  // at once
  struct Shared {
    std::uint64_t results[kBuffers];
    PackItem items[kSamples];
    ExponentSample samples[kSamples];
  };

  [[nodiscard]] bool close_memory();

  Driver& driver_;
  const int device_;
  const bool wanted_;
  std::unique_ptr<Registered<Shared>> shared_;
  Address address_ = 0;  // reserved for all buffers
  std::optional<Handle> handle_;
  std::size_t bytes_ = 0;  // of the handle
  bool mapped_ = false;
  bool refused_ = false;
  std::vector<Buffer> buffers_;
  std::size_t next_ = 0;
};

}  // namespace memsaver
