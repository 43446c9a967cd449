#pragma once

#include "vmm/saver.hpp"

namespace memsaver {

// Owns addresses of a device for a buffer that processes share, and the memory behind them, which comes and goes. Any
// thread may call any function of the classes below. Every function that is not noexcept throws driver errors, forked
// or context_lost.
class FixedRange {
 public:
  // Reserves `bytes`, rounded up to what the device maps at once. The saver must outlive this.
  FixedRange(Saver& saver, int device, std::size_t bytes);
  // Gives memory and addresses back; what the driver refuses is only logged. Does nothing once the saver has ended.
  ~FixedRange();

  [[nodiscard]] Address address() const noexcept { return range_->address(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 protected:
  // Maps the memory that `take` returns, after giving back what a failed unmap() left. Only while it is not accessible.
  // Throws what `take` throws, too: nothing is mapped.
  void map(const std::function<Handle()>& take);
  // Waits for the device, then unmaps and releases the memory. Throws: the memory is as it was or unmapped, and a
  // repeat does the rest.
  void unmap();
  // Queues work on a stream and waits for it.
  void run(const std::function<void(Stream)>& work);
  // Calls `function` with mutex_ held, and adds device, bytes and address to its errors.
  void named(const std::function<void()>& function) EXCLUDES(mutex_);

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
  SharedBuffer(Saver& saver, int device, std::size_t bytes);

  // Returns a descriptor of the memory for ImportedBuffer in another process, which the caller closes. After a
  // release() the buffer no longer uses that memory. Throws configuration, too, while released.
  [[nodiscard]] int export_fd() EXCLUDES(mutex_);
  // Copies the content to host memory and gives the device memory back; does nothing while released. The device gets it
  // once no other process has it mapped and every exported descriptor is closed. Throws out_of_host_memory, too: the
  // buffer is as it was, or released except for a handle that a repeat gives back.
  void release() EXCLUDES(mutex_);
  // Takes new memory and copies the content to it; does nothing while not released. Throws: it is released as before.
  void restore() EXCLUDES(mutex_);

 private:
  std::unique_ptr<HostMapping> content_ GUARDED_BY(mutex_);  // while released, until it is back
};

// Owns the mapping of another process's SharedBuffer for a device of this process.
class ImportedBuffer : public FixedRange {
 public:
  // Maps the memory of descriptor `file`, which remains the caller's. `bytes` are those of the SharedBuffer.
  ImportedBuffer(Saver& saver, int file, std::size_t bytes, int device);

  [[nodiscard]] bool mapped() EXCLUDES(mutex_);

  // Unmaps and releases the memory, keeps the addresses; does nothing if dropped. Throws: it is mapped as before, or
  // unmapped except for a handle that a repeat gives back.
  void drop() EXCLUDES(mutex_);
  // Maps the memory of another descriptor at the same address. Throws configuration, too, if not dropped: nothing has
  // changed.
  void map_again(int file) EXCLUDES(mutex_);
};

}  // namespace memsaver
