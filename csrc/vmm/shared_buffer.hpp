#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>

#include "driver/driver.hpp"
#include "support/mutex.hpp"
#include "vmm/saver.hpp"

namespace memsaver {

// Addresses of a device that stay reserved while the memory behind them comes and goes.
class FixedRange {
 public:
  // Reserves `bytes`, rounded up to what the device maps at once. Throws as reserve() of the driver.
  FixedRange(Saver& saver, int device, std::size_t bytes);
  FixedRange(const FixedRange&) = delete;
  FixedRange& operator=(const FixedRange&) = delete;
  // Gives memory and addresses back; what the driver refuses is only logged. Does nothing in a forked child, or when
  // the process is ending.
  ~FixedRange();

  [[nodiscard]] Address address() const noexcept { return address_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 protected:
  // Maps the memory that `take` returns, after giving back what a failed unmap() left. Only while not mapped. When this
  // throws there is none.
  void map(const std::function<Handle()>& take);
  // Waits for the device, then unmaps and releases the memory. When this throws, the memory is as it was or unmapped,
  // and a repeat does the rest.
  void unmap();
  // Queues work and waits for it.
  void run(const std::function<void(Stream)>& work);
  // Calls `function`, and adds to its errors what they concern.
  void named(const std::function<void()>& function) const;

  Mutex mutex_;  // for all but address and bytes, which never change
  Saver& saver_;
  Driver& driver_;
  const int device_;
  std::size_t bytes_;
  Address address_ = 0;
  std::optional<Handle> handle_;
  bool accessible_ = false;  // there is memory that can be used

 private:
  void give_back();

  bool mapped_ = false;
};

// A buffer of this process that other processes can map, each at an address of its own. Its memory can be given back
// meanwhile; its address and content stay. For buffers of some MiB: content is copied synchronously. Any thread may
// call every function; an error is one of the driver, ErrorKind::forked or ErrorKind::context_lost.
class SharedBuffer : public FixedRange {
 public:
  // `bytes` are rounded up to what the device maps at once. The content is zeros. The saver must outlive it.
  SharedBuffer(Saver& saver, int device, std::size_t bytes);

  // A descriptor of the memory for ImportedBuffer in another process; the caller closes it. One of before a release()
  // is of memory that is not used any more. Throws ErrorKind::configuration while released.
  [[nodiscard]] int export_fd() EXCLUDES(mutex_);
  // Copies the content to host memory and gives the device memory back; nothing while released. The device gets it when
  // no other process has it mapped and every exported descriptor is closed. When this throws, the buffer is as it was,
  // or released but for a handle that a repeat gives back. Also throws ErrorKind::out_of_host_memory.
  void release() EXCLUDES(mutex_);
  // New memory with the content; nothing while not released. When this throws, the buffer is released as before.
  void restore() EXCLUDES(mutex_);

 private:
  struct Unmapping {
    std::size_t bytes;
    void operator()(void* memory) const;
  };
  using HostCopy = std::unique_ptr<void, Unmapping>;
  void create();

  HostCopy content_ GUARDED_BY(mutex_);  // while released, until it is back
};

// A SharedBuffer of another process, mapped in this one for a device of this one.
class ImportedBuffer : public FixedRange {
 public:
  // `bytes` are those of the SharedBuffer. The descriptor remains the caller's.
  ImportedBuffer(Saver& saver, int file, std::size_t bytes, int device);

  [[nodiscard]] bool mapped() EXCLUDES(mutex_);

  // Unmaps and lets go of the memory, keeps the addresses; nothing if dropped. When this throws, it is mapped as
  // before, or unmapped but for a handle that a repeat gives back.
  void drop() EXCLUDES(mutex_);
  // Maps the memory of another descriptor at the same address. Throws ErrorKind::configuration if not dropped.
  void map_again(int file) EXCLUDES(mutex_);

 private:
  void take(int file);
};

}  // namespace memsaver
