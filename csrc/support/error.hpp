#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace memsaver {

enum class ErrorKind {
  out_of_device_memory,
  out_of_host_memory,
  disk_full,
  driver,
  context_lost,
  backup,
  configuration,
  forked
};

// The one exception type of the core. Callers on the way up add what they know (tag, bytes, device); what() is always
// complete.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, std::string message);

  // A failed call: its name and the name of its error, as the driver or the system spells them.
  static Error from_driver(ErrorKind kind, std::string call, std::string code, std::string detail);

  // Each adds a fact, unless it is known already.
  Error& with_tag(const std::string& tag);
  Error& with_bytes(std::size_t bytes);
  Error& with_memory(std::size_t needed_bytes, std::size_t free_bytes);
  Error& with_device(int device);
  Error& with_address(std::uintptr_t address);
  Error& with_advice(const std::string& advice);

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
  Error& add(Fact& fact, const Fact& unknown, const Fact& value);
  Error& compose();
  std::string message_;
  std::string advice_;
  std::string text_;
};

}  // namespace memsaver
