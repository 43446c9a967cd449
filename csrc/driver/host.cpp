#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "driver/driver.hpp"
#include "driver/host_account.hpp"
#include "support/host_memory.hpp"

namespace memsaver {

namespace {

Error system_failure(const char* call, int code, std::size_t bytes) {
  const auto kind = code == ENOMEM || code == ENOSPC ? ErrorKind::out_of_device_memory : ErrorKind::driver;
  return Error::from_errno(kind, call, code).with_bytes(bytes);
}

void* pointer(Address address) { return reinterpret_cast<void*>(address); }

// Maps addresses without access; by default with no memory behind them.
Address map_pages(Address at, std::size_t bytes, int flags, int file = -1, off_t offset = 0) {
  void* const memory = mmap(pointer(at), bytes, PROT_NONE, flags, file, offset);
  if (memory == MAP_FAILED) throw system_failure("mmap", errno, bytes);
  return reinterpret_cast<Address>(memory);
}
constexpr int kNoMemory = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// Owns the physical memory of a device: ranges of one memfd, so that any number of handles takes one descriptor. A
// handle is an offset, never reused, plus one. Exportable memory is a separate memfd: its handle is kFile | descriptor.
class HostDevice {
 public:
  HostDevice(const std::string& name, std::size_t capacity)
      : account(HostAccount::open(name, capacity)), label(name.empty() ? "private-" + std::to_string(getpid()) : name) {
    file_ = memfd_create("memsaver-device", MFD_CLOEXEC);
    if (file_ < 0) throw system_failure("memfd_create", errno, 0);
  }
  ~HostDevice() { close(file_); }

  Handle create(std::size_t bytes, bool exportable) {
    check_room(bytes);
    account->take(bytes);
    const int file = exportable ? memfd_create("memsaver-shared", MFD_CLOEXEC) : file_;
    const off_t offset = exportable ? 0 : next_.fetch_add(static_cast<off_t>(bytes));
    if (file < 0 || !change(file, 0, offset, bytes)) {
      const int code = errno;
      if (!exportable) static_cast<void>(change(file, kPunch, offset, bytes));
      if (exportable && file >= 0) close(file);
      account->give(bytes);
      throw system_failure(file < 0 ? "memfd_create" : "fallocate", code, bytes);
    }
    return Handle{exportable ? kFile | static_cast<std::uint64_t>(file) : static_cast<std::uint64_t>(offset) + 1};
  }

  static int export_handle(Handle handle) { return duplicate(file_of(handle)); }

  static Handle import_handle(int file, std::size_t bytes) {
    struct stat status{};
    if (fstat(file, &status) != 0) throw system_failure("fstat", errno, bytes);
    if (static_cast<std::size_t>(status.st_size) != bytes) {
      throw Error(ErrorKind::configuration, "descriptor " + std::to_string(file) + " has " +
                                                std::to_string(status.st_size) + " bytes, not " +
                                                std::to_string(bytes));
    }
    return Handle{kFile | kImported | static_cast<std::uint64_t>(duplicate(file))};
  }

  void release(Handle handle, std::size_t bytes) {
    if (is_file(handle)) {
      close(file_of(handle));
    } else if (!change(file_, kPunch, offset_of(handle), bytes)) {
      throw system_failure("fallocate", errno, bytes);
    }
    if (!is_imported(handle)) account->give(bytes);
  }

  void map(Address address, std::size_t bytes, Handle handle) const {
    const bool own_file = is_file(handle);
    map_pages(address, bytes, MAP_SHARED | MAP_FIXED, own_file ? file_of(handle) : file_,
              own_file ? 0 : offset_of(handle));
  }

  std::shared_ptr<HostAccount> account;
  std::string label;
  std::atomic<std::size_t> stack_limit{1024};  // as CUDA's

 private:
  static constexpr std::uint64_t kFile = std::uint64_t{1} << 63;
  static constexpr std::uint64_t kImported = std::uint64_t{1} << 62;

  static off_t offset_of(Handle handle) { return static_cast<off_t>(static_cast<std::uint64_t>(handle) - 1); }
  static bool is_file(Handle handle) { return (static_cast<std::uint64_t>(handle) & kFile) != 0; }
  static bool is_imported(Handle handle) { return is_file(handle) && (static_cast<std::uint64_t>(handle) & kImported); }
  static int file_of(Handle handle) { return static_cast<int>(static_cast<std::uint64_t>(handle)); }
  static int duplicate(int file) {
    const int copy = fcntl(file, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) throw system_failure("fcntl", errno, 0);
    return copy;
  }

  // Refuses memory that is not available: its use would invoke the OOM killer. Checks once for each kSpareMemory bytes.
  void check_room(std::size_t bytes) {
    if (unchecked_.fetch_add(bytes) + bytes < kSpareMemory) return;
    unchecked_ = 0;
    std::size_t available = 0;
    try {
      available = available_memory_bytes();
    } catch (const Error&) {
      return;  // without descriptors nothing can be read, and a resume must work all the same
    }
    if (bytes + kSpareMemory <= available) return;
    throw Error(ErrorKind::out_of_device_memory,
                "the memory of the host device is that of this machine or of its control group, which lacks it")
        .with_memory(bytes + kSpareMemory, available)
        .with_advice("let other processes free memory or raise the group's limit, and repeat");
  }

  // Commits the range, or returns its pages with kPunch. Returns false, with errno, on failure.
  [[nodiscard]] static bool change(int file, int mode, off_t offset, std::size_t bytes) {
    while (fallocate(file, mode, offset, static_cast<off_t>(bytes)) != 0) {
      if (errno != EINTR) return false;
    }
    return true;
  }
  static constexpr int kPunch = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;

  int file_ = -1;
  std::atomic<off_t> next_{0};
  std::atomic<std::size_t> unchecked_{0};  // created since the last check
};

class HostDriver final : public Driver {
 public:
  HostDriver(const std::vector<std::string>& names, std::size_t capacity) {
    const std::size_t bytes = capacity != 0 ? capacity : machine_memory_bytes() / 2;
    const std::size_t whole = bytes / page_bytes() * page_bytes();
    if (whole == 0) throw Error(ErrorKind::configuration, "MEMSAVER_HOST_CAPACITY is less than one page");
    for (const auto& name : names) devices_.push_back(std::make_unique<HostDevice>(name, whole));
    if (names.empty()) devices_.push_back(std::make_unique<HostDevice>("", whole));
  }

  bool in_host_memory() const noexcept override { return true; }
  int device_count() override { return static_cast<int>(devices_.size()); }

  DeviceInfo device_info(int device) override {
    auto& host = at(device);
    return {"host-" + host.label, "host memory", host.account->capacity_bytes(), page_bytes(), -1};
  }

  bool links_directly(int, const std::string&) override { return true; }
  MemoryInfo memory_info(int device) override {
    auto& account = *at(device).account;
    return {account.free_bytes(), account.capacity_bytes()};
  }

  Address reserve(int device, std::size_t bytes) override {
    at(device);
    return map_pages(0, bytes, kNoMemory);
  }

  void unreserve(int, Address address, std::size_t bytes) override {
    if (munmap(pointer(address), bytes) != 0) throw system_failure("munmap", errno, bytes);
  }

  Handle create(int device, std::size_t bytes, bool exportable) override {
    return at(device).create(bytes, exportable);
  }
  void release(int device, Handle handle, std::size_t bytes) override { at(device).release(handle, bytes); }
  int export_handle(int, Handle handle) override { return HostDevice::export_handle(handle); }
  Handle import_handle(int device, int file, std::size_t bytes) override {
    at(device);
    return HostDevice::import_handle(file, bytes);
  }
  void map(int device, Address address, std::size_t bytes, Handle handle) override {
    at(device).map(address, bytes, handle);
  }

  void allow_access(int, Address address, std::size_t bytes, const std::vector<int>&) override {
    if (mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE) != 0) throw system_failure("mprotect", errno, bytes);
  }

  void unmap(int, Address address, std::size_t bytes) override { map_pages(address, bytes, kNoMemory | MAP_FIXED); }

  // Calls are synchronous: there is never anything to wait for.
  void synchronize(int device) override { at(device); }
  void trim_graph_memory(int device) override { at(device); }
  std::size_t stack_limit(int device) override { return at(device).stack_limit; }
  void set_stack_limit(int device, std::size_t bytes) override { at(device).stack_limit = bytes; }

  Stream create_stream(int device) override {
    at(device);
    return Stream{1};
  }
  void destroy_stream(int, Stream) override {}

  void copy_to_host(int, void* to, Address from, std::size_t bytes, Stream) override {
    std::memcpy(to, pointer(from), bytes);
  }
  void copy_to_device(int, Address to, const void* from, std::size_t bytes, Stream) override {
    std::memcpy(pointer(to), from, bytes);
  }
  void copy_on_device(int, Address to, Address from, std::size_t bytes, Stream) override {
    std::memcpy(pointer(to), pointer(from), bytes);
  }
  void fill_zero(int, Address address, std::size_t bytes, Stream) override { std::memset(pointer(address), 0, bytes); }
  void digest(int, const DigestKey& key, const DigestItem* items, std::size_t count, Digest* results, Stream) override {
    for (std::size_t i = 0; i < count; ++i) results[i] = digest_on_host(key, items[i]);
  }
  bool has_digest(int) noexcept override { return true; }

  void sample(int, const PackItem* items, std::size_t count, ExponentSample* samples, Stream) override {
    for (std::size_t i = 0; i < count; ++i) sample_on_host(pointer(items[i].address), items[i].bytes, samples[i]);
  }
  void pack(int, const PackPlan& plan, const PackItem& content, const PackItem& room, std::uint64_t* packed_bytes,
            Stream) override {
    *packed_bytes = pack_on_host(plan, pointer(content.address), content.bytes, pointer(room.address), room.bytes);
  }
  void unpack(int, const PackItem& packed, const PackItem& content, std::uint64_t* damaged, Stream) override {
    if (!unpack_on_host(pointer(packed.address), packed.bytes, pointer(content.address), content.bytes)) *damaged = 1;
  }
  bool has_packing(int) noexcept override { return true; }

  Event record(int, Stream) override { return Event{1}; }
  bool done(int, Event) override { return true; }
  void wait(int, Event) override {}
  void recycle(int, Event) noexcept override {}
  void stream_wait(int, Stream, Event) override {}

  void register_host(void*, std::size_t) override {}
  void unregister_host(void*) override {}

  std::vector<std::pair<int, int>> accounts() override {
    std::vector<std::pair<int, int>> accounts;
    for (const auto& device : devices_) accounts.push_back({device->account->file(), device->account->slot()});
    return accounts;
  }

 private:
  HostDevice& at(int device) {
    if (device < 0 || device >= device_count()) {
      throw Error(ErrorKind::configuration, "there is no host device " + std::to_string(device) + " (" +
                                                std::to_string(device_count()) +
                                                " named); name several in MEMSAVER_HOST_DEVICE, separated by commas");
    }
    return *devices_[static_cast<std::size_t>(device)];
  }

  std::vector<std::unique_ptr<HostDevice>> devices_;
};

}  // namespace

std::unique_ptr<Driver> open_host_driver(const std::vector<std::string>& names, std::size_t capacity_bytes) {
  return std::make_unique<HostDriver>(names, capacity_bytes);
}

}  // namespace memsaver
