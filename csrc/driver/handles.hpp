#pragma once

#include "driver/driver.hpp"
#include "support/log.hpp"
#include "support/system.hpp"

// Objects that own what a driver gave them, and give it back at the end of their life.

namespace memsaver {

// As attempt(), but throws context_lost: for calls whose other failures only make later work slower.
inline bool attempt_unless_lost(const char* what, const std::function<void()>& call) {
  try {
    call();
    return true;
  } catch (const Error& error) {
    if (error.kind == ErrorKind::context_lost) throw;
    warn(std::string(what) + ": " + error.what());
    return false;
  }
}

// Owns an event after all that a stream holds when this is made.
class RecordedEvent {
 public:
  // Throws driver errors.
  RecordedEvent(Driver& driver, int device, Stream stream)
      : driver_(driver), device_(device), event_(driver.record(device, stream)) {}
  RecordedEvent(const RecordedEvent&) = delete;
  ~RecordedEvent() { driver_.recycle(device_, event_); }

  // These throw driver errors.
  [[nodiscard]] bool done() const { return driver_.done(device_, event_); }
  void wait() const { driver_.wait(device_, event_); }
  // Lets later work of `stream` begin only after the event.
  void hold(Stream stream) const { driver_.stream_wait(device_, stream, event_); }

 private:
  Driver& driver_;
  const int device_;
  const Event event_;
};
using Recorded = std::shared_ptr<const RecordedEvent>;

// Waits until a stream has nothing to do. What fails is logged: a device that cannot be synchronized, either, has lost
// its context and runs nothing.
inline void settle(Driver& driver, int device, Stream stream) {
  if (attempt("while waiting for copies to end", [&] { RecordedEvent(driver, device, stream).wait(); })) return;
  attempt("while waiting for the device", [&] { driver.synchronize(device); });
}

// Owns a stream of a device.
class OwnStream {
 public:
  // Throws driver errors.
  OwnStream(Driver& driver, int device) : driver_(driver), device_(device), stream_(driver.create_stream(device)) {}
  OwnStream(const OwnStream&) = delete;
  // At process exit the context may be gone.
  ~OwnStream() {
    attempt("a stream was not destroyed", [this] { driver_.destroy_stream(device_, stream_); });
  }
  operator Stream() const { return stream_; }

 private:
  Driver& driver_;
  const int device_;
  const Stream stream_;
};

// Owns mapped host memory, and its registration with a driver. Any thread may call pinned() meanwhile.
class HostMapping {
 public:
  HostMapping(void* memory, std::size_t bytes) : memory_(memory), bytes_(bytes) {}
  HostMapping(HostMapping&& other) noexcept
      : process_(other.process_),
        memory_(std::exchange(other.memory_, nullptr)),
        bytes_(other.bytes_),
        driver_(other.driver_.exchange(nullptr)) {}
  // Does nothing in a forked child, which owns neither.
  ~HostMapping() {
    if (memory_ == nullptr || getpid() != process_) return;
    try {
      unpin();
    } catch (const std::exception&) {
      // At process exit the context may be gone; the kernel unpins the memory.
    }
    munmap(memory_, bytes_);
  }

  // Throws as Driver::register_host(): the memory is not pinned.
  void pin(Driver& driver) {
    driver.register_host(memory_, bytes_);
    driver_ = &driver;
  }
  // Does nothing unless pinned. Throws driver errors: the memory stays pinned.
  void unpin() {
    if (Driver* const driver = driver_) driver->unregister_host(memory_);
    driver_ = nullptr;
  }
  [[nodiscard]] bool pinned() const { return driver_ != nullptr; }
  [[nodiscard]] void* data() const { return memory_; }
  [[nodiscard]] std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(memory_); }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  const pid_t process_ = getpid();
  void* memory_;
  const std::size_t bytes_;
  std::atomic<Driver*> driver_{nullptr};  // that registered it, or null
};

// Owns a `Value` of zero bytes in registered host memory.
template <typename Value>
class Registered {
 public:
  // Throws out_of_host_memory or driver errors.
  explicit Registered(Driver& driver) : memory_(sys::map(sizeof(Value), MAP_POPULATE), sizeof(Value)) {
    memory_.pin(driver);
  }
  Value& operator*() const { return *static_cast<Value*>(memory_.data()); }
  Value* operator->() const { return &**this; }

 private:
  HostMapping memory_;
};

// Owns addresses of a device, which stay reserved, and the memory that comes and goes there. One thread at a time.
class DeviceRange {
 public:
  // Reserves `bytes`, a multiple of the granularity. Throws driver errors.
  DeviceRange(Driver& driver, int device, std::size_t bytes)
      : driver_(driver), device_(device), reserved_(bytes), address_(driver.reserve(device, bytes)) {}
  DeviceRange(const DeviceRange&) = delete;
  ~DeviceRange() {
    try {
      close();
    } catch (const std::exception&) {
      // At process exit the context may be gone.
    }
  }

  // Maps the `bytes` of memory that `take` returns. Only while there is none. Throws driver errors and what `take`
  // throws: nothing is accessible, and unmap() undoes the rest.
  void map(std::size_t bytes, const std::function<Handle()>& take) {
    handle_ = take();
    bytes_ = bytes;
    driver_.map(device_, address_, bytes, *handle_);
    mapped_ = true;
    driver_.allow_access(device_, address_, bytes, {});
    accessible_ = true;
  }
  // Unmaps the memory and gives it back. Throws driver errors: a repeat does the rest.
  void unmap() {
    if (mapped_) driver_.unmap(device_, address_, bytes_);
    mapped_ = accessible_ = false;
    if (handle_) driver_.release(device_, *handle_, bytes_);
    handle_.reset();
  }
  // Gives memory and addresses back. Throws as unmap().
  void close() {
    unmap();
    if (address_ != 0) driver_.unreserve(device_, address_, reserved_);
    address_ = 0;
  }
  // Forgets memory and addresses: in a forked child, and when the process is ending, nothing is given back.
  void abandon() noexcept {
    address_ = 0;
    mapped_ = accessible_ = false;
    handle_.reset();
  }

  [[nodiscard]] Address address() const noexcept { return address_; }
  [[nodiscard]] std::optional<Handle> handle() const noexcept { return handle_; }
  // Returns the bytes of the memory; 0 without any.
  [[nodiscard]] std::size_t memory_bytes() const noexcept { return handle_ ? bytes_ : 0; }
  [[nodiscard]] bool mapped() const noexcept { return mapped_; }
  [[nodiscard]] bool accessible() const noexcept { return accessible_; }

 private:
  Driver& driver_;
  const int device_;
  const std::size_t reserved_;
  Address address_;
  std::optional<Handle> handle_;
  std::size_t bytes_ = 0;
  bool mapped_ = false;
  bool accessible_ = false;
};

}  // namespace memsaver
