#include "vmm/shared_buffer.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <utility>

#include "support/error.hpp"
#include "support/log.hpp"
#include "support/scope_exit.hpp"
#include "support/sizes.hpp"
#include "support/system.hpp"
#include "support/transaction.hpp"
#include "vmm/physical_memory.hpp"

namespace memsaver {

FixedRange::FixedRange(Saver& saver, int device, std::size_t bytes)
    : saver_(saver), driver_(saver.driver()), device_(device), bytes_(bytes) {
  named([&] {
    bytes_ = round_up(std::max<std::size_t>(bytes, 1), driver_.device_info(device_).granularity);
    address_ = driver_.reserve(device_, bytes_);
  });
}

FixedRange::~FixedRange() {
  if (saver_.ended()) return;
  try {
    unmap();
    driver_.unreserve(device_, address_, bytes_);
  } catch (const std::exception& error) {
    warn(std::string("a shared buffer was not given back: ") + error.what());
  }
}

void FixedRange::map(const std::function<Handle(Driver&)>& take) {
  give_back();
  Transaction undo;
  undo.on_rollback([this] { give_back(); });
  try {
    handle_ = take(driver_);
    driver_.map(device_, address_, bytes_, *handle_);
    mapped_ = true;
    driver_.allow_access(device_, address_, bytes_, {});
  } catch (Error& error) {
    add_free_memory(error, driver_, device_, bytes_);
    throw;
  }
  accessible_ = true;
  undo.commit();
}

void FixedRange::unmap() {
  if (mapped_) driver_.synchronize(device_);
  give_back();
}

void FixedRange::give_back() {
  if (mapped_) driver_.unmap(device_, address_, bytes_);
  mapped_ = accessible_ = false;
  if (handle_) driver_.release(device_, *handle_, bytes_);
  handle_.reset();
}

void FixedRange::run(const std::function<void(Driver&, Stream)>& work) {
  const Stream stream = driver_.create_stream(device_);
  Transaction cleanup;
  cleanup.on_rollback([&] { driver_.destroy_stream(device_, stream); });
  work(driver_, stream);
  driver_.synchronize(device_);
}

void FixedRange::named(const std::function<void()>& function) const {
  try {
    saver_.check_usable();
    function();
  } catch (Error& error) {
    throw error.with_device(device_).with_bytes(bytes_).with_address(address_);
  }
}

void SharedBuffer::Unmapping::operator()(void* memory) const { munmap(memory, bytes); }

SharedBuffer::SharedBuffer(Saver& saver, int device, std::size_t bytes) : range_(saver, device, bytes) {
  range_.named([&] {
    create();
    range_.run([&](Driver& driver, Stream stream) {
      driver.fill_zero(range_.device(), range_.address(), range_.bytes(), stream);
    });
  });
}

void SharedBuffer::create() {
  range_.map([&](Driver& driver) { return driver.create_exportable(range_.device(), range_.bytes()); });
}

int SharedBuffer::export_fd() {
  const Lock lock(mutex_);
  int file = -1;
  range_.named([&]() REQUIRES(mutex_) {
    if (content_) throw Error(ErrorKind::configuration, "the shared buffer is released; restore it first");
    file = range_.driver().export_handle(range_.device(), range_.handle());
  });
  return file;
}

void SharedBuffer::release() {
  const Lock lock(mutex_);
  range_.named([&]() REQUIRES(mutex_) {
    if (content_) return range_.unmap();  // what an earlier failure left
    range_.driver().synchronize(range_.device());
    HostCopy content(sys::map_memory(range_.bytes(), 0), {range_.bytes()});
    range_.run([&](Driver& driver, Stream stream) {
      driver.copy_to_host(range_.device(), content.get(), range_.address(), range_.bytes(), stream);
    });
    const ScopeExit at_end([&]() REQUIRES(mutex_) {
      if (!range_.mapped()) content_ = std::move(content);
    });
    range_.unmap();
  });
}

void SharedBuffer::restore() {
  const Lock lock(mutex_);
  range_.named([&]() REQUIRES(mutex_) {
    if (!content_) return;
    if (!range_.mapped()) create();  // else the undo of an earlier failure failed
    Transaction undo;
    undo.on_rollback([&] { range_.unmap(); });
    range_.run([&](Driver& driver, Stream stream) REQUIRES(mutex_) {
      driver.copy_to_device(range_.device(), range_.address(), content_.get(), range_.bytes(), stream);
    });
    undo.commit();
    content_.reset();
  });
}

ImportedBuffer::ImportedBuffer(Saver& saver, int file, std::size_t bytes, int device) : range_(saver, device, bytes) {
  range_.named([&] { map(file); });
}

bool ImportedBuffer::mapped() {
  const Lock lock(mutex_);
  return range_.mapped();
}

void ImportedBuffer::drop() {
  const Lock lock(mutex_);
  range_.named([&] { range_.unmap(); });
}

void ImportedBuffer::map_again(int file) {
  const Lock lock(mutex_);
  range_.named([&] {
    if (range_.mapped()) throw Error(ErrorKind::configuration, "the imported buffer is mapped; drop it first");
    map(file);
  });
}

void ImportedBuffer::map(int file) {
  range_.map([&](Driver& driver) { return driver.import_handle(range_.device(), file, range_.bytes()); });
}

}  // namespace memsaver
