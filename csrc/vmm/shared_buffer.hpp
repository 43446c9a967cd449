#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "driver/driver.hpp"
#include "driver/handles.hpp"
#include "support/cleanup.hpp"
#include "support/error.hpp"
#include "support/log.hpp"
#include "support/mutex.hpp"
#include "support/sizes.hpp"
#include "support/system.hpp"
#include "vmm/physical_memory.hpp"
#include "vmm/saver.hpp"

namespace memsaver {

// Owns addresses of a device for a buffer that processes share, and the memory behind them, which comes and goes. What
// both kinds below have in common; any thread may call any function of theirs. Every function but those that are
// noexcept throws driver errors, forked or context_lost.
class FixedRange {
 public:
  // Reserves `bytes`, rounded up to what the device maps at once. The saver must outlive this.
  FixedRange(Saver& saver, int device, std::size_t bytes)
      : saver_(saver), driver_(saver.driver()), device_(device), bytes_(bytes) {
    named([&] {
      bytes_ = round_up(std::max<std::size_t>(bytes, 1), driver_.device_info(device_).granularity);
      range_.emplace(driver_, device_, bytes_);
    });
  }
  // Gives memory and addresses back; what the driver refuses is only logged. Does nothing in a forked child, or when
  // the process is ending.
  ~FixedRange() {
    try {
      if (!saver_.ended()) {
        unmap();
        range_->close();
      }
    } catch (const std::exception& error) {
      warn(std::string("a shared buffer was not given back: ") + error.what());
    }
    range_->abandon();
  }

  [[nodiscard]] Address address() const noexcept { return range_->address(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 protected:
  // Maps the memory that `take` returns, after giving back what a failed unmap() left. Only while it is not accessible.
  // Throws what `take` throws, too: there is none.
  void map(const std::function<Handle()>& take) {
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
  // Waits for the device, then unmaps and releases the memory. Throws: the memory is as it was or unmapped, and a
  // repeat does the rest.
  void unmap() {
    if (range_->mapped()) driver_.synchronize(device_);
    range_->unmap();
  }
  // Queues work on a stream and waits for it.
  void run(const std::function<void(Stream)>& work) {
    const OwnStream stream(driver_, device_);
    work(stream);
    driver_.synchronize(device_);
  }
  // Calls `function`, and adds device, bytes and address to its errors.
  void named(const std::function<void()>& function) const {
    try {
      saver_.check_usable();
      function();
    } catch (Error& error) {
      throw error.with_device(device_).with_bytes(bytes_).with_address(range_ ? address() : 0);
    }
  }

  Mutex mutex_;  // guards all but address and bytes, which never change
  Saver& saver_;
  Driver& driver_;
  const int device_;
  std::size_t bytes_;
  std::optional<DeviceRange> range_;  // always there once constructed
};

// Owns a buffer that other processes can map, each at another address. Its memory can be given back meanwhile; its
// address and content stay. For buffers of some MiB: content is copied synchronously.
class SharedBuffer : public FixedRange {
 public:
  // Makes a buffer of zeros.
  SharedBuffer(Saver& saver, int device, std::size_t bytes) : FixedRange(saver, device, bytes) {
    named([&] {
      map([&] { return driver_.create_exportable(device_, bytes_); });
      run([&](Stream stream) { driver_.fill_zero(device_, address(), bytes_, stream); });
    });
  }

  // Returns a descriptor of the memory for ImportedBuffer in another process, which the caller closes. After a
  // release() it is of memory that is no longer used. Throws configuration, too, while released.
  [[nodiscard]] int export_fd() EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    int file = -1;
    named([&]() REQUIRES(mutex_) {
      if (content_) throw Error(ErrorKind::configuration, "the shared buffer is released; restore it first");
      file = driver_.export_handle(device_, range_->handle().value());
    });
    return file;
  }
  // Copies the content to host memory and gives the device memory back; does nothing while released. The device gets it
  // once no other process has it mapped and every exported descriptor is closed. Throws out_of_host_memory, too: the
  // buffer is as it was, or released except for a handle that a repeat gives back.
  void release() EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    named([&]() REQUIRES(mutex_) {
      if (content_) return unmap();  // what an earlier failure left
      driver_.synchronize(device_);
      auto content = std::make_unique<HostMapping>(sys::map_memory(bytes_, 0), bytes_);
      run([&](Stream stream) { driver_.copy_to_host(device_, content->data(), address(), bytes_, stream); });
      const Cleanup at_end([&]() REQUIRES(mutex_) {
        if (!range_->accessible()) content_ = std::move(content);
      });
      unmap();
    });
  }
  // Takes new memory and copies the content to it; does nothing while not released. Throws: it is released as before.
  void restore() EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    named([&]() REQUIRES(mutex_) {
      if (!content_) return;
      // It is accessible if the undo of an earlier failure failed.
      if (!range_->accessible()) map([&] { return driver_.create_exportable(device_, bytes_); });
      Cleanup undo([&] { unmap(); });
      run([&](Stream stream)
              REQUIRES(mutex_) { driver_.copy_to_device(device_, address(), content_->data(), bytes_, stream); });
      undo.dismiss();
      content_.reset();
    });
  }

 private:
  std::unique_ptr<HostMapping> content_ GUARDED_BY(mutex_);  // while released, until it is back
};

// Owns the mapping of another process's SharedBuffer for a device of this process.
class ImportedBuffer : public FixedRange {
 public:
  // Maps the memory of descriptor `file`, which remains the caller's. `bytes` are those of the SharedBuffer.
  ImportedBuffer(Saver& saver, int file, std::size_t bytes, int device) : FixedRange(saver, device, bytes) {
    named([&] { map([&] { return driver_.import_handle(device_, file, bytes_); }); });
  }

  [[nodiscard]] bool mapped() EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    return range_->accessible();
  }

  // Unmaps and releases the memory, keeps the addresses; does nothing if dropped. Throws: it is mapped as before, or
  // unmapped except for a handle that a repeat gives back.
  void drop() EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    named([&] { unmap(); });
  }
  // Maps the memory of another descriptor at the same address. Throws configuration, too, if not dropped: nothing has
  // changed.
  void map_again(int file) EXCLUDES(mutex_) {
    const Lock lock(mutex_);
    named([&] {
      if (range_->accessible()) throw Error(ErrorKind::configuration, "the imported buffer is mapped; drop it first");
      map([&] { return driver_.import_handle(device_, file, bytes_); });
    });
  }
};

}  // namespace memsaver
