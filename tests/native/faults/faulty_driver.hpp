#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver/driver.hpp"
#include "support/error.hpp"

namespace memsaver {

// Any driver, with failures on request: what tests use to fail every call of a scenario in turn.
class FaultyDriver final : public Driver {
 public:
  explicit FaultyDriver(std::unique_ptr<Driver> driver);

  // The `nth` call from now (1: the next) of the function `call` ("create", "map", ...) fails with `kind`, without
  // reaching the driver; `times` calls in a row. Several failures may be planned. A lost context is lost to every call
  // from then on.
  void fail(const std::string& call, std::size_t nth, ErrorKind kind, std::size_t times);
  // Every call of `call` takes `seconds` longer before it reaches the driver, or until heal(); 0 ends that for later
  // ones.
  void delay(const std::string& call, double seconds);
  // Forgets all planned failures and delays; calls that stand still go on. What loss() says stays.
  void heal();
  // Calls that were made to fail since the last heal().
  [[nodiscard]] std::size_t failures() const;
  // Calls so far, by function.
  [[nodiscard]] std::map<std::string, std::size_t> counts() const;

  bool in_host_memory() const noexcept override;
  int device_count() override;
  DeviceInfo device_info(int device) override;
  bool links_directly(int device, const std::string& uuid) override;
  MemoryInfo memory_info(int device) override;
  Address reserve(int device, std::size_t bytes) override;
  void unreserve(int device, Address address, std::size_t bytes) override;
  Handle create(int device, std::size_t bytes, bool exportable = false) override;
  void release(int device, Handle handle, std::size_t bytes) override;
  int export_handle(int device, Handle handle) override;
  Handle import_handle(int device, int file, std::size_t bytes) override;
  void map(int device, Address address, std::size_t bytes, Handle handle) override;
  void allow_access(int device, Address address, std::size_t bytes, const std::vector<int>& peers) override;
  void unmap(int device, Address address, std::size_t bytes) override;
  void synchronize(int device) override;
  void trim_graph_memory(int device) override;
  std::size_t graph_memory(int device) override;
  std::size_t stack_limit(int device) override;
  void set_stack_limit(int device, std::size_t bytes) override;
  Stream create_stream(int device) override;
  void destroy_stream(int device, Stream stream) override;
  void copy_to_host(int device, void* to, Address from, std::size_t bytes, Stream stream) override;
  void copy_to_device(int device, Address to, const void* from, std::size_t bytes, Stream stream) override;
  void copy_on_device(int device, Address to, Address from, std::size_t bytes, Stream stream) override;
  void fill_zero(int device, Address address, std::size_t bytes, Stream stream) override;
  void digest(int device, const DigestKey& key, const DigestItem* items, std::size_t count, Digest* results,
              Stream stream) override;
  void prepare_digest(int device) noexcept override;
  bool has_digest(int device) noexcept override;
  void sample(int device, const PackItem* items, std::size_t count, ExponentSample* samples, Stream stream) override;
  void pack(int device, const PackPlan& plan, const PackItem& content, const PackItem& room,
            std::uint64_t* packed_bytes, Stream stream) override;
  void unpack(int device, const PackItem& packed, const PackItem& content, std::uint64_t* damaged,
              Stream stream) override;
  void prepare_packing(int device) noexcept override;
  bool has_packing(int device) noexcept override;
  void end() noexcept override { driver_->end(); }
  Event record(int device, Stream stream) override;
  bool done(int device, Event event) override;
  void wait(int device, Event event) override;
  void recycle(int device, Event event) noexcept override;
  void stream_wait(int device, Stream stream, Event event) override;
  void register_host(void* address, std::size_t bytes) override;
  void unregister_host(void* address) override;
  std::string loss() const override;
  std::vector<std::pair<int, int>> accounts() override;

 private:
  struct Fault {
    std::string call;
    std::size_t nth;
    ErrorKind kind;
    std::size_t times;
  };
  void enter(const std::string& call);

  std::unique_ptr<Driver> driver_;
  mutable std::mutex mutex_;
  std::vector<Fault> faults_;
  std::map<std::string, double> delays_;
  std::map<std::string, std::size_t> counts_;
  std::condition_variable healed_;
  std::size_t heals_ = 0;
  std::size_t failures_ = 0;
  bool lost_ = false;
  std::string loss_;
};

}  // namespace memsaver
