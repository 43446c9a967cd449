#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "support/digest.hpp"

namespace memsaver {

using Address = std::uintptr_t;
enum class Handle : std::uint64_t {};  // physical memory
enum class Stream : std::uint64_t {};  // a queue of copies and kernels on one device
enum class Event : std::uint64_t {};   // a point in a stream

struct DeviceInfo {
  std::string uuid;         // the driver's name of the device, as NVML spells it
  std::string name;         // the product's name
  std::size_t total_bytes;  // memory of the device
  std::size_t granularity;  // every reservation, handle and mapping is a multiple of it
  int numa_node;            // of the host memory next to the device, -1 where unknown
  bool rdma;                // memory is created GPUDirect-RDMA capable
};

struct MemoryInfo {
  std::size_t free_bytes;
  std::size_t total_bytes;
};

// Where a process's share of a device is accounted for, for a helper that checkpoints it from outside.
struct DeviceAccount {
  int file;
  int slot;
};

// What a virtual-memory driver can do: the one seam to the machine.
//
// Every function throws Error and then has had no effect, unless its comment says otherwise. All may be called from
// any thread; calls on one stream must not overlap. `device` counts as torch does in this process.
class Driver {
 public:
  virtual ~Driver() = default;

  [[nodiscard]] virtual const char* name() const noexcept = 0;
  [[nodiscard]] virtual int device_count() = 0;
  [[nodiscard]] virtual DeviceInfo device_info(int device) = 0;
  // What is free at this moment. Another process may take it before the caller does.
  [[nodiscard]] virtual MemoryInfo memory_info(int device) = 0;

  // Address space without memory behind it.
  [[nodiscard]] virtual Address reserve(int device, std::size_t bytes) = 0;
  virtual void unreserve(int device, Address address, std::size_t bytes) = 0;

  // Physical memory without an address. Content is undefined. Out of memory is ErrorKind::out_of_device_memory.
  [[nodiscard]] virtual Handle create(int device, std::size_t bytes) = 0;
  // Gives memory back. It must not be mapped any more.
  virtual void release(int device, Handle handle, std::size_t bytes) = 0;

  // Puts a whole handle behind a reserved range. Readable only after allow_access.
  virtual void map(int device, Address address, std::size_t bytes, Handle handle) = 0;
  // Lets `device`, and those of `peers` that can reach its memory, read and write a mapped range.
  virtual void allow_access(int device, Address address, std::size_t bytes, const std::vector<int>& peers) = 0;
  // The range of a whole handle. Nothing may be using it: synchronize first.
  virtual void unmap(int device, Address address, std::size_t bytes) = 0;

  // Waits for all work of this process on the device.
  virtual void synchronize(int device) = 0;

  // Gives back what the driver caches for allocations inside of CUDA graphs and no graph uses now.
  virtual void trim_graph_memory(int device) = 0;
  // Bytes that it holds for them, in use or cached.
  [[nodiscard]] virtual std::size_t graph_memory(int) { return 0; }

  [[nodiscard]] virtual Stream create_stream(int device) = 0;
  virtual void destroy_stream(int device, Stream stream) = 0;
  // Copies are asynchronous; the host range must lie within one registered range to run at the link's speed.
  virtual void copy_to_host(int device, void* to, Address from, std::size_t bytes, Stream stream) = 0;
  virtual void copy_to_device(int device, Address to, const void* from, std::size_t bytes, Stream stream) = 0;
  virtual void fill_zero(int device, Address address, std::size_t bytes, Stream stream) = 0;
  // The digest of each item into results[i], asynchronously. Both arrays must lie in registered host memory and live
  // until the stream has passed. Only where has_digest(device).
  virtual void digest(int device, const DigestKey& key, const DigestItem* items, std::size_t count, Digest* results,
                      Stream stream) = 0;
  // Does in advance what has_digest needs time for and the device does not notice, so also while others use or capture
  // its streams. Needs no lock of the caller; never throws.
  virtual void prepare_digest(int) noexcept {}
  // Whether digest works there. May compile a kernel at the first call; never throws.
  [[nodiscard]] virtual bool has_digest(int device) noexcept = 0;
  // Whether a digest costs far less than a copy of the same bytes.
  [[nodiscard]] virtual bool digest_is_cheap() const noexcept = 0;

  // A point behind all that the stream holds now. It belongs to the caller until recycle().
  [[nodiscard]] virtual Event record(int device, Stream stream) = 0;
  [[nodiscard]] virtual bool done(int device, Event event) = 0;
  virtual void wait(int device, Event event) = 0;
  virtual void recycle(int device, Event event) noexcept = 0;
  // Later work of `stream` runs after `event`.
  virtual void stream_wait(int device, Stream stream, Event event) = 0;

  // Pins host memory for copies and kernels of every device.
  virtual void register_host(void* address, std::size_t bytes) = 0;
  virtual void unregister_host(void* address) = 0;

  // What the first call said that found the context lost, whoever made it; empty while it is not.
  [[nodiscard]] virtual std::string loss() const { return {}; }

  // One for each device, where this process is checkpointed by way of its accounts; none where the operating system's
  // number of it is enough. The descriptors stay the driver's.
  [[nodiscard]] virtual std::vector<DeviceAccount> accounts() { return {}; }
};

// Whether libcuda is here and finds a device; where not, `why` says what is missing.
[[nodiscard]] bool cuda_available(std::string* why) noexcept;

// Whether the NVIDIA driver can checkpoint processes.
[[nodiscard]] bool cuda_can_checkpoint() noexcept;

// Whether kernels of `device` can use memory at `address` that another device holds: peer access is on. False where
// that cannot be told. `device` must have a context.
[[nodiscard]] bool cuda_reaches(int device, Address address) noexcept;

}  // namespace memsaver
