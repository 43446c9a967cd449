#include "support/error.hpp"

#include <cstdio>
#include <cstring>
#include <utility>

namespace memsaver {

Error::Error(ErrorKind error_kind, std::string message)
    : std::runtime_error(message), kind(error_kind), message_(std::move(message)) {
  compose();
}

Error Error::from_driver(ErrorKind kind, std::string call, std::string code, std::string detail) {
  Error error(kind, call + " failed: " + code + (detail.empty() ? "" : " (" + detail + ")"));
  error.call = std::move(call);
  error.code = std::move(code);
  return error;
}

Error Error::from_errno(ErrorKind kind, std::string call, int code, const std::string& about) {
  const char* const name = strerrorname_np(code);
  return from_driver(kind, std::move(call), name != nullptr ? name : "unknown", std::strerror(code) + about);
}

template <typename Fact>
Error& Error::add(Fact& fact, const Fact& unknown, const Fact& value) {
  if (fact == unknown) fact = value;
  return compose();
}

Error& Error::with_tag(const std::string& name) { return add(tag, {}, name); }
Error& Error::with_bytes(std::size_t count) { return add(bytes, {}, count); }
Error& Error::with_device(int index) { return add(device, -1, index); }
Error& Error::with_address(std::uintptr_t value) { return add(address, {}, value); }
Error& Error::with_advice(const std::string& advice) { return add(advice_, {}, advice); }

Error& Error::with_memory(std::size_t needed, std::size_t free) {
  needed_bytes = needed;
  free_bytes = free;
  return compose();
}

Error& Error::compose() {
  text_ = message_;
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

}  // namespace memsaver
