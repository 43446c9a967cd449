#include "vmm/shared_buffer.hpp"

#include "vmm/physical_memory.hpp"

namespace memsaver {

FixedRange::FixedRange(Saver& saver, int device, std::size_t bytes)
    : saver_(saver), driver_(saver.driver()), device_(device), bytes_(bytes) {
  named([&] {
    bytes_ = round_up(std::max<std::size_t>(bytes, 1), driver_.device_info(device_).granularity);
    range_.emplace(driver_, device_, bytes_);
  });
}

FixedRange::~FixedRange() {
  attempt("a shared buffer was not given back", [this] {
    if (saver_.ended()) return;
    unmap();
    range_->close();
  });
  range_->abandon();
}

void FixedRange::map(const std::function<Handle()>& take) {
  range_->unmap();
  Cleanup undo([this] { range_->unmap(); });
  try {
    range_->map(bytes_, take);
  } catch (Error& error) {
    add_free_memory(error, driver_, device_, bytes_);
    throw;
  }
  undo.dismiss();
}

void FixedRange::unmap() {
  if (range_->mapped()) driver_.synchronize(device_);
  range_->unmap();
}

void FixedRange::run(const std::function<void(Stream)>& work) {
  const OwnStream stream(driver_, device_);
  work(stream);
  driver_.synchronize(device_);
}

void FixedRange::named(const std::function<void()>& function) {
  const Lock lock(mutex_);
  try {
    saver_.check_usable();
    function();
  } catch (Error& error) {
    throw error.with_device(device_).with_bytes(bytes_).with_address(range_ ? address() : 0);
  }
}

SharedBuffer::SharedBuffer(Saver& saver, int device, std::size_t bytes) : FixedRange(saver, device, bytes) {
  named([&] {
    map([&] { return driver_.create(device_, bytes_, true); });
    run([&](Stream stream) { driver_.fill_zero(device_, address(), bytes_, stream); });
  });
}

int SharedBuffer::export_fd() {
  int file = -1;
  named([&]() REQUIRES(mutex_) {
    if (content_) throw Error(ErrorKind::configuration, "the shared buffer is released; restore it first");
    file = driver_.export_handle(device_, range_->handle().value());
  });
  return file;
}

void SharedBuffer::release() {
  named([&]() REQUIRES(mutex_) {
    if (content_) return unmap();  // an earlier release failed and left it mapped
    driver_.synchronize(device_);
    auto content = std::make_unique<HostMapping>(sys::map(bytes_), bytes_);
    run([&](Stream stream) { driver_.copy_to_host(device_, content->data(), address(), bytes_, stream); });
    const Cleanup at_end([&]() REQUIRES(mutex_) {
      if (!range_->accessible()) content_ = std::move(content);
    });
    unmap();
  });
}

void SharedBuffer::restore() {
  named([&]() REQUIRES(mutex_) {
    if (!content_) return;
    // It is accessible already if an earlier restore failed and could not be undone.
    if (!range_->accessible()) map([&] { return driver_.create(device_, bytes_, true); });
    Cleanup undo([&] { unmap(); });
    run([&](Stream stream)
            REQUIRES(mutex_) { driver_.copy_to_device(device_, address(), content_->data(), bytes_, stream); });
    undo.dismiss();
    content_.reset();
  });
}

ImportedBuffer::ImportedBuffer(Saver& saver, int file, std::size_t bytes, int device)
    : FixedRange(saver, device, bytes) {
  named([&] { map([&] { return driver_.import_handle(device_, file, bytes_); }); });
}

bool ImportedBuffer::mapped() {
  const Lock lock(mutex_);
  return range_->accessible();
}

void ImportedBuffer::drop() {
  named([&] { unmap(); });
}

void ImportedBuffer::map_again(int file) {
  named([&] {
    if (range_->accessible()) throw Error(ErrorKind::configuration, "the imported buffer is mapped; drop it first");
    map([&] { return driver_.import_handle(device_, file, bytes_); });
  });
}

}  // namespace memsaver
