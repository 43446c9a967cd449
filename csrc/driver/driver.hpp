#pragma once

#include <memory>
#include <vector>

#include "support/digest.hpp"
#include "support/packing.hpp"

namespace memsaver {

using Address = std::uintptr_t;
enum class Handle : std::uint64_t {};  // physical memory
enum class Stream : std::uint64_t {};  // a queue of copies and kernels on one device
enum class Event : std::uint64_t {};   // a point in a stream

struct DeviceInfo {
  std::string uuid;         // as NVML writes it
  std::string name;         // of the product
  std::size_t total_bytes;  // memory of the device
  std::size_t granularity;  // every reservation, handle and mapping is a multiple of it
  int numa_node;            // of the host memory closest to the device, -1 if unknown
};

struct MemoryInfo {
  std::size_t free_bytes;
  std::size_t total_bytes;
};

// The interface to devices and their virtual memory. Any thread may call any function, but calls on one stream must not
// overlap. `device` is torch's index in this process; one that does not exist is a configuration error.
//
// Each function that is not noexcept may throw driver errors, and had no effect then unless its comment says otherwise.
// The caller owns what a function returns until it calls the function that takes it back.
class Driver {
 public:
  virtual ~Driver() = default;

  [[nodiscard]] virtual int device_count() = 0;
  [[nodiscard]] virtual DeviceInfo device_info(int device) = 0;
  // Returns whether NVLink, or what this driver has in its place, connects the device with another one, also one of
  // other processes only. Not while the process is checkpointed.
  [[nodiscard]] virtual bool links_directly(int device, const std::string& uuid) = 0;
  // Returns a snapshot: another process may take the free memory at any time.
  [[nodiscard]] virtual MemoryInfo memory_info(int device) = 0;

  // Returns address space without memory behind it.
  [[nodiscard]] virtual Address reserve(int device, std::size_t bytes) = 0;
  virtual void unreserve(int device, Address address, std::size_t bytes) = 0;

  // Returns physical memory without an address; its content is undefined. Other processes can map it as well if it is
  // `exportable`. Throws out_of_device_memory.
  [[nodiscard]] virtual Handle create(int device, std::size_t bytes, bool exportable = false) = 0;
  // Gives memory, which must be unmapped, back to the device.
  virtual void release(int device, Handle handle, std::size_t bytes) = 0;

  // Returns a descriptor of exportable memory for another process to import, which the caller closes. Until then, and
  // while any process has imported it, the memory may stay in use.
  [[nodiscard]] virtual int export_handle(int device, Handle handle) = 0;
  // Returns a handle of memory that another process exported, to be mapped for `device` and released as any other. The
  // memory stays that process's, the descriptor the caller's.
  [[nodiscard]] virtual Handle import_handle(int device, int file, std::size_t bytes) = 0;

  // Maps a whole handle to a reserved range, which is accessible only after allow_access().
  virtual void map(int device, Address address, std::size_t bytes, Handle handle) = 0;
  // Gives `device`, and those of `peers` that can access its memory, read and write access to a mapped range.
  virtual void allow_access(int device, Address address, std::size_t bytes, const std::vector<int>& peers) = 0;
  // Unmaps the range of a whole handle. Nothing may be using it: synchronize first.
  virtual void unmap(int device, Address address, std::size_t bytes) = 0;

  // Waits for all work of this process on the device.
  virtual void synchronize(int device) = 0;

  // Gives memory that is cached for allocations in CUDA graphs, and that no graph uses now, back to the device.
  virtual void trim_graph_memory(int device) = 0;
  // Returns the bytes reserved for allocations in CUDA graphs, in use or cached.
  [[nodiscard]] virtual std::size_t graph_memory(int) { return 0; }

  // Returns the bytes of stack for each thread of a kernel. The context holds device memory for the stacks of all
  // threads that can run at once; a kernel that needs a larger stack raises the limit when it is launched.
  [[nodiscard]] virtual std::size_t stack_limit(int device) = 0;
  // Waits for all work on the device, and changes what the context holds before it returns.
  virtual void set_stack_limit(int device, std::size_t bytes) = 0;

  [[nodiscard]] virtual Stream create_stream(int device) = 0;
  virtual void destroy_stream(int device, Stream stream) = 0;
  // These are asynchronous. Copies run at the link's speed if the host range lies within one registered range.
  virtual void copy_to_host(int device, void* to, Address from, std::size_t bytes, Stream stream) = 0;
  virtual void copy_to_device(int device, Address to, const void* from, std::size_t bytes, Stream stream) = 0;
  // Either range may lie in memory that another device's process exported.
  virtual void copy_on_device(int device, Address to, Address from, std::size_t bytes, Stream stream) = 0;
  virtual void fill_zero(int device, Address address, std::size_t bytes, Stream stream) = 0;
  // Digests item i into results[i], asynchronously: both stay in registered memory meanwhile. Only if has_digest().
  virtual void digest(int device, const DigestKey& key, const DigestItem* items, std::size_t count, Digest* results,
                      Stream stream) = 0;
  // Does the slow part of the first has_digest(), without using the device: streams may be in use or captured.
  virtual void prepare_digest(int) noexcept {}
  // Returns whether digest() works. The first call may compile a kernel.
  [[nodiscard]] virtual bool has_digest(int device) noexcept = 0;

  // As in support/packing.hpp, asynchronously; arrays and results must be in registered host memory that outlives the
  // work. Only if has_packing().
  virtual void sample(int device, const PackItem* items, std::size_t count, ExponentSample* samples, Stream stream) = 0;
  // Packs `content` into `room`. Writes the packed bytes to *packed_bytes, 0 if there are more than the room.
  virtual void pack(int device, const PackPlan& plan, const PackItem& content, const PackItem& room,
                    std::uint64_t* packed_bytes, Stream stream) = 0;
  // Writes 1 to *damaged, which must be 0, if `packed` is not the packed form of content.bytes.
  virtual void unpack(int device, const PackItem& packed, const PackItem& content, std::uint64_t* damaged,
                      Stream stream) = 0;
  // Compiles the kernels without which has_packing() is false, without using the device.
  virtual void prepare_packing(int) noexcept {}
  // Returns whether content can be packed: never before prepare_packing(). Compiles nothing.
  [[nodiscard]] virtual bool has_packing(int device) noexcept = 0;

  // Returns an event after all current work of the stream.
  [[nodiscard]] virtual Event record(int device, Stream stream) = 0;
  [[nodiscard]] virtual bool done(int device, Event event) = 0;
  virtual void wait(int device, Event event) = 0;
  virtual void recycle(int device, Event event) noexcept = 0;
  // Lets later work of `stream` begin only after `event`.
  virtual void stream_wait(int device, Stream stream, Event event) = 0;

  // Pins host memory for copies and kernels of every device. Throws out_of_host_memory or driver errors.
  virtual void register_host(void* address, std::size_t bytes) = 0;
  virtual void unregister_host(void* address) = 0;

  // Prepares for the end of the process: waits until no kernel is being compiled, and lets none be compiled later.
  virtual void end() noexcept {}

  // Returns whether device memory is host memory: then it counts against the limits of host memory, and an access to
  // released memory is a segmentation fault.
  [[nodiscard]] virtual bool in_host_memory() const noexcept { return false; }

  // Returns the message of the first failure that lost the context; empty if it is not lost.
  [[nodiscard]] virtual std::string loss() const { return {}; }

  // Returns what a helper that checkpoints this process needs besides its id: for each device the descriptor of a
  // HostAccount, which remains the driver's, and the process's slot in it.
  [[nodiscard]] virtual std::vector<std::pair<int, int>> accounts() { return {}; }
};

// Returns a driver of NVIDIA GPUs, by libcuda's virtual memory management in the primary context of each device, as
// torch uses it. A context is created at the first call that needs it. Throws configuration if CUDA is not available.
[[nodiscard]] std::unique_ptr<Driver> open_cuda_driver();

// Returns why libcuda finds no device; an empty string if it does.
[[nodiscard]] std::string cuda_missing();

[[nodiscard]] bool cuda_can_checkpoint() noexcept;  // whether libcuda has the checkpoint functions

// Returns whether kernels of `device` can access memory of another device at `address`, because peer access is on;
// false if `device` has no context or the address is unknown.
[[nodiscard]] bool cuda_reaches(int device, Address address) noexcept;

// Returns a driver of devices made of host memory: the same semantics on real pages, without a GPU. Each name is one
// device; an empty list is one private device. `capacity_bytes` of 0 is half of the memory of this machine or of its
// control group. Throws configuration.
[[nodiscard]] std::unique_ptr<Driver> open_host_driver(const std::vector<std::string>& names,
                                                       std::size_t capacity_bytes);

}  // namespace memsaver
