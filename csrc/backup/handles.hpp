#pragma once

#include <sys/mman.h>

#include <memory>

#include "driver/driver.hpp"
#include "support/log.hpp"
#include "support/system.hpp"

namespace memsaver {

// What a driver gave, given back to it at the end of its life.

// The end of what a stream held when this was made.
class RecordedEvent {
 public:
  RecordedEvent(Driver& driver, int device, Stream stream)
      : driver_(driver), device_(device), event_(driver.record(device, stream)) {}
  RecordedEvent(const RecordedEvent&) = delete;
  RecordedEvent& operator=(const RecordedEvent&) = delete;
  ~RecordedEvent() { driver_.recycle(device_, event_); }

  [[nodiscard]] bool done() const { return driver_.done(device_, event_); }
  void wait() const { driver_.wait(device_, event_); }
  // Later work of `stream` runs after it.
  void hold(Stream stream) const { driver_.stream_wait(device_, stream, event_); }

 private:
  Driver& driver_;
  const int device_;
  const Event event_;
};
using Recorded = std::shared_ptr<const RecordedEvent>;

class OwnStream {
 public:
  OwnStream(Driver& driver, int device) : driver_(driver), device_(device), stream_(driver.create_stream(device)) {}
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  ~OwnStream() {
    try {
      driver_.destroy_stream(device_, stream_);
    } catch (const std::exception& error) {
      warn(std::string("a stream was not destroyed: ") + error.what());  // at process exit the context may be gone
    }
  }
  operator Stream() const { return stream_; }

 private:
  Driver& driver_;
  const int device_;
  const Stream stream_;
};

// A `Value` of zero bytes in registered host memory.
template <typename Value>
class Registered {
 public:
  explicit Registered(Driver& driver)
      : driver_(driver), value_(static_cast<Value*>(sys::map_memory(sizeof(Value), MAP_POPULATE))) {
    try {
      driver_.register_host(value_, sizeof(Value));
    } catch (...) {
      munmap(value_, sizeof(Value));
      throw;
    }
  }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;
  ~Registered() {
    try {
      driver_.unregister_host(value_);
    } catch (const std::exception&) {
      // At process exit the context may be gone.
    }
    munmap(value_, sizeof(Value));
  }
  Value& operator*() const { return *value_; }
  Value* operator->() const { return value_; }

 private:
  Driver& driver_;
  Value* const value_;
};

}  // namespace memsaver
