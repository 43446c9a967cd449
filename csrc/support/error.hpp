#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

// glibc has it from 2.32 on; the wheels are for 2.28.
extern "C" const char* strerrorname_np(int) noexcept __attribute__((weak));

namespace memsaver {

// Every header of csrc states its contracts in one form. Above a class: what it owns, and which threads may call it.
// Above a function, as far as its signature does not say it: what it does with its parameters, what it returns, and
// "Throws <kind>: <what holds then>", by the names below; "driver errors" are out_of_device_memory, driver and
// context_lost. A function without "Throws" throws nothing but std::bad_alloc. Sizes are in bytes. No file includes a
// system header, or a header of a lower folder, that another of its includes already includes.
enum class ErrorKind {
  out_of_device_memory,
  out_of_host_memory,
  disk_full,
  driver,         // a call to the device's driver failed
  context_lost,   // likewise, and no call on the device can succeed any more
  backup,         // content cannot be written to a backup, or read from it
  configuration,  // what was requested cannot work here
  forked,         // the process is a forked child of the one that made the object
};

// The one exception type of the core. Callers add what they know by with_...(); what() contains all of it.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind error_kind, std::string message)
      : std::runtime_error(message), kind(error_kind), text_(std::move(message)) {}

  // Returns the error of a failed call: its name and the name of its error, as the driver or the system spells them.
  static Error from_driver(ErrorKind kind, std::string call, std::string code, std::string detail) {
    Error error(kind, call + " failed: " + code + (detail.empty() ? "" : " (" + detail + ")"));
    error.call = std::move(call);
    error.code = std::move(code);
    return error;
  }
  // Returns the error of a failed system call: `code` is its errno; `about` is appended to the system's message.
  static Error from_errno(ErrorKind kind, std::string call, int code, const std::string& about = "") {
    const char* const name = strerrorname_np != nullptr ? strerrorname_np(code) : nullptr;
    return from_driver(kind, std::move(call), name != nullptr ? name : "unknown", std::strerror(code) + about);
  }

  // Each adds a fact, unless it is known already (with_memory: always).
  Error& with_tag(const std::string& name) { return add(tag, {}, name); }
  Error& with_bytes(std::size_t count) { return add(bytes, {}, count); }
  Error& with_memory(std::size_t needed, std::size_t free) {
    needed_bytes = needed;
    free_bytes = free;
    return compose();
  }
  Error& with_device(int index) { return add(device, -1, index); }
  Error& with_address(std::uintptr_t value) { return add(address, {}, value); }
  Error& with_advice(const std::string& advice) { return add(advice_, {}, advice); }

  [[nodiscard]] const char* what() const noexcept override { return text_.c_str(); }

  ErrorKind kind;
  std::string call;
  std::string code;
  std::string tag;
  std::size_t bytes = 0;
  std::size_t needed_bytes = 0;
  std::size_t free_bytes = 0;
  int device = -1;
  std::uintptr_t address = 0;

 private:
  template <typename Fact>
  Error& add(Fact& fact, const Fact& unknown, const Fact& value) {
    if (fact == unknown) fact = value;
    return compose();
  }
  Error& compose() {
    text_ = std::runtime_error::what();
    std::string about;
    const auto add = [&about](const std::string& part) { about += (about.empty() ? " [" : ", ") + part; };
    if (!tag.empty()) add("tag '" + tag + "'");
    if (device >= 0) add("device " + std::to_string(device));
    if (bytes != 0) add(std::to_string(bytes) + " bytes");
    if (address != 0) {
      char text[32];
      std::snprintf(text, sizeof text, "at 0x%zx", static_cast<std::size_t>(address));
      add(text);
    }
    if (needed_bytes != 0) {
      add(std::to_string(needed_bytes) + " bytes needed");
      add(std::to_string(free_bytes) + " free");
    }
    if (!about.empty()) text_ += about + "]";
    if (!advice_.empty()) text_ += "; " + advice_;
    return *this;
  }
  std::string advice_;
  std::string text_;
};

// Throws configuration, naming `setting`, unless `name` is 1 to 64 letters, digits, '-', '_' and '.'.
inline void check_name(const std::string& setting, const std::string& name) {
  constexpr char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
  if (!name.empty() && name.size() <= 64 && name.find_first_not_of(plain) == std::string::npos) return;
  throw Error(ErrorKind::configuration,
              setting + ": the name '" + name + "' must be 1 to 64 letters, digits, '-', '_' and '.'");
}

}  // namespace memsaver
