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

void FixedRange::map(const std::function<Handle()>& take) {
  give_back();
  Transaction undo;
  undo.on_rollback([this] { give_back(); });
  try {
    handle_ = take();
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

void FixedRange::run(const std::function<void(Stream)>& work) {
  const Stream stream = driver_.create_stream(device_);
  Transaction cleanup;
  cleanup.on_rollback([&] { driver_.destroy_stream(device_, stream); });
  work(stream);
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

SharedBuffer::SharedBuffer(Saver& saver, int device, std::size_t bytes) : FixedRange(saver, device, bytes) {
  named([&] {
    create();
    run([&](Stream stream) { driver_.fill_zero(device_, address_, bytes_, stream); });
  });
}

void SharedBuffer::create() {
  map([&] { return driver_.create_exportable(device_, bytes_); });
}

int SharedBuffer::export_fd() {
  const Lock lock(mutex_);
  int file = -1;
  named([&]() REQUIRES(mutex_) {
    if (content_) throw Error(ErrorKind::configuration, "the shared buffer is released; restore it first");
    file = driver_.export_handle(device_, handle_.value());
  });
  return file;
}

void SharedBuffer::release() {
  const Lock lock(mutex_);
  named([&]() REQUIRES(mutex_) {
    if (content_) return unmap();  // what an earlier failure left
    driver_.synchronize(device_);
    HostCopy content(sys::map_memory(bytes_, 0), {bytes_});
    run([&](Stream stream) { driver_.copy_to_host(device_, content.get(), address_, bytes_, stream); });
    const ScopeExit at_end([&]() REQUIRES(mutex_) {
      if (!accessible_) content_ = std::move(content);
    });
    unmap();
  });
}

void SharedBuffer::restore() {
  const Lock lock(mutex_);
  named([&]() REQUIRES(mutex_) {
    if (!content_) return;
    if (!accessible_) create();  // else the undo of an earlier failure failed
    Transaction undo;
    undo.on_rollback([&] { unmap(); });
    run([&](Stream stream)
            REQUIRES(mutex_) { driver_.copy_to_device(device_, address_, content_.get(), bytes_, stream); });
    undo.commit();
    content_.reset();
  });
}

ImportedBuffer::ImportedBuffer(Saver& saver, int file, std::size_t bytes, int device)
    : FixedRange(saver, device, bytes) {
  named([&] { take(file); });
}

bool ImportedBuffer::mapped() {
  const Lock lock(mutex_);
  return accessible_;
}

void ImportedBuffer::drop() {
  const Lock lock(mutex_);
  named([&] { unmap(); });
}

void ImportedBuffer::map_again(int file) {
  const Lock lock(mutex_);
  named([&] {
    if (accessible_) throw Error(ErrorKind::configuration, "the imported buffer is mapped; drop it first");
    take(file);
  });
}

void ImportedBuffer::take(int file) {
  map([&] { return driver_.import_handle(device_, file, bytes_); });
}

}  // namespace memsaver
