#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "driver/driver.hpp"
#include "support/error.hpp"

namespace memsaver {

// Wraps a driver with ordinary memory, keeps a record to compare a saver's with, and uses all freedom of the contract:
// - copies, fills and digests run only when they are waited for, as late as a device may run them;
// - freshly mapped memory holds garbage;
// - it may refuse to unmap a range for any time, and have no digests;
// - it records every misuse: a handle released while mapped, a range unmapped or host memory unpinned during work on
//   it, work on unmapped memory, an event recycled twice, anything never freed.
class LedgerDriver final : public Driver {
  template <typename Function>
  auto with_lock(Function function) const {
    const std::lock_guard<std::recursive_mutex> lock(mutex_);
    return function();
  }

 public:
  // The final result: violations of the contract, and what was never freed, by kind.
  struct Report {
    std::vector<std::string> misuses;
    std::map<std::string, std::size_t> left_behind;
  };

  explicit LedgerDriver(std::unique_ptr<Driver> driver, bool digests = true, bool packing = true)
      : driver_(std::move(driver)), digests_(digests), packing_(packing) {}
  ~LedgerDriver() override {
    if (report_ != nullptr) *report_ = {misuses_, held()};
  }
  // Where the destructor writes its report.
  void report_to(Report* report) { report_ = report; }

  // Host memory of copies need not be pinned from now on; drivers take longer then.
  void allow_unpinned_copies() {
    with_lock([&] { unpinned_copies_ = true; });
  }
  // No device has a direct link from now on.
  void cut_links() {
    with_lock([&] { links_ = false; });
  }
  // The next `count` ranges to be unmapped are not, however often that is tried, until let_go().
  void refuse_unmaps(std::size_t count) {
    with_lock([&] {
      refusals_ = count;
      holding_ = true;
    });
  }
  void let_go() {
    with_lock([&] {
      refusals_ = 0;
      holding_ = false;
    });
  }
  // Whether what is mapped there was refused to be unmapped, and still is mapped.
  [[nodiscard]] bool is_stuck(Address address) const {
    return with_lock([&] { return stuck_.count(address) != 0; });
  }
  // The context is lost: nothing runs on the device any more.
  void lose_work() {
    with_lock([&] {
      for (auto& [stream, queue] : queues_) {
        queue.begin = queue.end();
        queue.work.clear();
      }
    });
  }

  struct Mapping {
    int device;
    std::size_t bytes;
    Handle handle;
    bool accessible;
  };

  // What was done against the contract so far.
  [[nodiscard]] std::vector<std::string> misuses() const {
    return with_lock([&] { return misuses_; });
  }
  [[nodiscard]] std::size_t created_bytes(int device) const {
    return with_lock([&] {
      std::size_t sum = 0;
      for (const auto& [handle, owned] : handles_) {
        if (owned.device == device && !owned.imported) sum += owned.bytes;
      }
      return sum;
    });
  }
  [[nodiscard]] std::map<Address, Mapping> mappings() const {
    return with_lock([&] { return mappings_; });
  }
  // Work that was not waited for yet.
  [[nodiscard]] std::size_t pending() const {
    return with_lock([&] {
      std::size_t sum = 0;
      for (const auto& [stream, queue] : queues_) sum += queue.work.size();
      return sum;
    });
  }
  [[nodiscard]] std::size_t events() const {
    return with_lock([&] { return events_.size(); });
  }
  // What is not freed yet, by kind; empty if nothing.
  [[nodiscard]] std::map<std::string, std::size_t> held() const {
    return with_lock([&] {
      std::map<std::string, std::size_t> held;
      const auto count = [&](std::size_t number, const char* what) {
        if (number > 0) held[what] = number;
      };
      count(events_.size(), "events");
      count(handles_.size(), "handles");
      count(mappings_.size(), "mappings");
      count(reservations_.size(), "reservations");
      count(registered_.size(), "registered ranges");
      count(queues_.size(), "streams");
      return held;
    });
  }

  int device_count() override { return driver_->device_count(); }
  DeviceInfo device_info(int device) override { return driver_->device_info(device); }
  bool links_directly(int device, const std::string& uuid) override {
    return with_lock([&] { return links_; }) && driver_->links_directly(device, uuid);
  }
  MemoryInfo memory_info(int device) override { return driver_->memory_info(device); }

  Address reserve(int device, std::size_t bytes) override {
    const Address address = driver_->reserve(device, bytes);
    with_lock([&] { reservations_[address] = bytes; });
    return address;
  }
  void unreserve(int device, Address address, std::size_t bytes) override {
    with_lock([&] {
      const auto found = reservations_.find(address);
      if (found == reservations_.end() || found->second != bytes) return misuse("unreserve of what was not reserved");
      for (const auto& [at, mapping] : mappings_) {
        if (at >= address && at < address + bytes) misuse("unreserve under a mapping");
      }
      reservations_.erase(found);
    });
    driver_->unreserve(device, address, bytes);
  }
  Handle create(int device, std::size_t bytes, bool exportable) override {
    const Handle handle = driver_->create(device, bytes, exportable);
    return noted(device, handle, bytes, false);
  }
  int export_handle(int device, Handle handle) override {
    with_lock([&] {
      if (handles_.count({device, handle}) == 0) misuse("export of an unknown handle");
    });
    return driver_->export_handle(device, handle);
  }
  Handle import_handle(int device, int file, std::size_t bytes) override {
    const Handle handle = driver_->import_handle(device, file, bytes);
    return noted(device, handle, bytes, true);
  }
  void release(int device, Handle handle, std::size_t bytes) override {
    with_lock([&] {
      const auto found = handles_.find({device, handle});
      if (found == handles_.end() || found->second.bytes != bytes) return misuse("release of an unknown handle");
      if (found->second.mapped) misuse("release of a mapped handle");
      handles_.erase(found);
    });
    driver_->release(device, handle, bytes);
  }
  void map(int device, Address address, std::size_t bytes, Handle handle) override {
    with_lock([&] {
      const auto found = handles_.find({device, handle});
      if (found == handles_.end() || found->second.bytes != bytes) return misuse("map of an unknown handle");
      if (found->second.mapped) misuse("map of a mapped handle");
      if (!reserved(address, bytes)) misuse("map outside of one reservation");
      for (const auto& [at, mapping] : mappings_) {
        if (at < address + bytes && address < at + mapping.bytes) misuse("map over a mapping");
      }
      if (in_use(address, bytes)) misuse("map under work that is under way");
      found->second.mapped = true;
      mappings_[address] = {device, bytes, handle, false};
    });
    driver_->map(device, address, bytes, handle);
  }
  void allow_access(int device, Address address, std::size_t bytes, const std::vector<int>& peers) override {
    driver_->allow_access(device, address, bytes, peers);
    with_lock([&] {
      const auto found = mappings_.find(address);
      if (found == mappings_.end() || found->second.bytes != bytes) return misuse("access to what is not mapped");
      found->second.accessible = true;
      if (handles_.at({device, found->second.handle}).imported) return;
      std::memset(reinterpret_cast<void*>(address), 0xa5, bytes);  // the content of fresh memory is undefined
    });
  }
  void unmap(int device, Address address, std::size_t bytes) override {
    with_lock([&] {
      const auto found = mappings_.find(address);
      if (found == mappings_.end() || found->second.bytes != bytes) return misuse("unmap of what is not mapped");
      if (stuck_.count(address) == 0 && refusals_ > 0) {
        --refusals_;
        stuck_.insert(address);
      }
      if (holding_ && stuck_.count(address) != 0) {
        throw Error::from_driver(ErrorKind::driver, "unmap", "REFUSED", "the range is held");
      }
      if (in_use(address, bytes)) misuse("unmap under work that is under way");
      const auto handle = handles_.find({device, found->second.handle});
      if (handle != handles_.end()) handle->second.mapped = false;
      mappings_.erase(found);
      stuck_.erase(address);
    });
    driver_->unmap(device, address, bytes);
  }

  void synchronize(int device) override {
    with_lock([&] {
      for (auto& [stream, queue] : queues_) {
        if (queue.device == device) run(queue, queue.end());
      }
    });
    driver_->synchronize(device);
  }
  void trim_graph_memory(int device) override { driver_->trim_graph_memory(device); }
  std::size_t stack_limit(int device) override { return driver_->stack_limit(device); }
  void set_stack_limit(int device, std::size_t bytes) override {
    synchronize(device);
    driver_->set_stack_limit(device, bytes);
  }
  Stream create_stream(int device) override {
    (void)driver_->create_stream(device);
    return with_lock([&] {
      const Stream stream{++last_};
      queues_[stream].device = device;
      return stream;
    });
  }
  void destroy_stream(int, Stream stream) override {
    with_lock([&] {
      const auto found = queues_.find(stream);
      if (found == queues_.end()) return misuse("destroy of an unknown stream");
      run(found->second, found->second.end());
      queues_.erase(found);
    });
  }
  void copy_to_host(int device, void* to, Address from, std::size_t bytes, Stream stream) override {
    const auto host = reinterpret_cast<std::uintptr_t>(to);
    enqueue(device, stream, {{from, bytes}}, {{host, bytes}},
            [=] { std::memcpy(to, reinterpret_cast<const void*>(from), bytes); });
  }
  void copy_to_device(int device, Address to, const void* from, std::size_t bytes, Stream stream) override {
    const auto host = reinterpret_cast<std::uintptr_t>(from);
    enqueue(device, stream, {{to, bytes}}, {{host, bytes}},
            [=] { std::memcpy(reinterpret_cast<void*>(to), from, bytes); });
  }
  void copy_on_device(int device, Address to, Address from, std::size_t bytes, Stream stream) override {
    enqueue(device, stream, {{to, bytes}, {from, bytes}}, {},
            [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes); });
  }
  void fill_zero(int device, Address address, std::size_t bytes, Stream stream) override {
    enqueue(device, stream, {{address, bytes}}, {}, [=] { std::memset(reinterpret_cast<void*>(address), 0, bytes); });
  }
  void digest(int device, const DigestKey& key, const DigestItem* items, std::size_t count, Digest* results,
              Stream stream) override {
    std::vector<Range> ranges;
    for (std::size_t i = 0; i < count; ++i) ranges.push_back({items[i].address, items[i].bytes});
    const std::vector<Range> host{{reinterpret_cast<std::uintptr_t>(items), count * sizeof *items},
                                  {reinterpret_cast<std::uintptr_t>(results), count * sizeof *results}};
    enqueue(device, stream, ranges, host, [=] {
      for (std::size_t i = 0; i < count; ++i) results[i] = digest_on_host(key, items[i]);
    });
  }
  bool has_digest(int device) noexcept override { return digests_ && driver_->has_digest(device); }

  void sample(int device, const PackItem* items, std::size_t count, ExponentSample* samples, Stream stream) override {
    std::vector<Range> ranges;
    for (std::size_t i = 0; i < count; ++i) ranges.push_back({items[i].address, items[i].bytes});
    const std::vector<Range> host{{reinterpret_cast<std::uintptr_t>(items), count * sizeof *items},
                                  {reinterpret_cast<std::uintptr_t>(samples), count * sizeof *samples}};
    enqueue(device, stream, ranges, host, [=] {
      for (std::size_t i = 0; i < count; ++i) {
        sample_on_host(reinterpret_cast<const void*>(items[i].address), items[i].bytes, samples[i]);
      }
    });
  }
  void pack(int device, const PackPlan& plan, const PackItem& content, const PackItem& room,
            std::uint64_t* packed_bytes, Stream stream) override {
    const auto result = reinterpret_cast<std::uintptr_t>(packed_bytes);
    enqueue(device, stream, {{content.address, content.bytes}, {room.address, room.bytes}},
            {{result, sizeof *packed_bytes}}, [=] {
              *packed_bytes = pack_on_host(plan, reinterpret_cast<const void*>(content.address), content.bytes,
                                           reinterpret_cast<void*>(room.address), room.bytes);
            });
  }
  void unpack(int device, const PackItem& packed, const PackItem& content, std::uint64_t* damaged,
              Stream stream) override {
    const auto result = reinterpret_cast<std::uintptr_t>(damaged);
    enqueue(device, stream, {{content.address, content.bytes}, {packed.address, packed.bytes}},
            {{result, sizeof *damaged}}, [=] {
              if (!unpack_on_host(reinterpret_cast<const void*>(packed.address), packed.bytes,
                                  reinterpret_cast<void*>(content.address), content.bytes)) {
                *damaged = 1;
              }
            });
  }
  void prepare_packing(int device) noexcept override { driver_->prepare_packing(device); }
  bool has_packing(int device) noexcept override { return packing_ && driver_->has_packing(device); }

  Event record(int, Stream stream) override {
    return with_lock([&] {
      const auto found = queues_.find(stream);
      const Event event{++last_};
      if (found == queues_.end()) {
        misuse("record in an unknown stream");
      } else {
        events_[event] = {stream, found->second.end()};
      }
      return event;
    });
  }
  // Each query lets a little work run.
  bool done(int, Event event) override {
    return with_lock([&] {
      const auto found = events_.find(event);
      if (found == events_.end()) return misuse("a look at an unknown event"), true;
      const auto queue = queues_.find(found->second.stream);
      if (queue == queues_.end()) return true;
      if (queue->second.begin < found->second.position) run(queue->second, queue->second.begin + 1);
      return queue->second.begin >= found->second.position;
    });
  }
  void wait(int, Event event) override {
    with_lock([&] { run_to(event); });
  }
  void recycle(int, Event event) noexcept override {
    with_lock([&] {
      if (events_.erase(event) == 0) misuse("recycle of an unknown event");
    });
  }
  // The event may be recycled before the other stream gets there.
  void stream_wait(int device, Stream stream, Event event) override {
    const Point point = with_lock([&] { return events_.count(event) ? events_[event] : Point{}; });
    enqueue(device, stream, {}, {}, [this, point] {
      const auto queue = queues_.find(point.stream);
      if (queue != queues_.end()) run(queue->second, point.position);
    });
  }
  void register_host(void* address, std::size_t bytes) override {
    driver_->register_host(address, bytes);
    with_lock([&] { registered_[reinterpret_cast<std::uintptr_t>(address)] = bytes; });
  }
  void unregister_host(void* address) override {
    with_lock([&] {
      const auto found = registered_.find(reinterpret_cast<std::uintptr_t>(address));
      if (found == registered_.end()) return misuse("unregister of unknown memory");
      if (in_use(found->first, found->second)) misuse("unregister under work that is under way");
      registered_.erase(found);
    });
    driver_->unregister_host(address);
  }

 private:
  using Range = std::pair<std::uintptr_t, std::size_t>;
  struct Work {
    std::vector<Range> device_ranges;
    std::vector<Range> host_ranges;
    std::function<void()> run;
  };
  struct Queue {
    int device = 0;
    std::uint64_t begin = 0;  // work done so far
    std::deque<Work> work;
    [[nodiscard]] std::uint64_t end() const { return begin + work.size(); }
  };
  struct Point {
    Stream stream{};
    std::uint64_t position = 0;
  };
  struct Owned {
    int device;
    std::size_t bytes;
    bool mapped;
    bool imported;  // the memory is another process's
  };

  void misuse(const std::string& what) { misuses_.push_back(what); }

  Handle noted(int device, Handle handle, std::size_t bytes, bool imported) {
    with_lock([&] { handles_[{device, handle}] = {device, bytes, false, imported}; });
    return handle;
  }
  void enqueue(int device, Stream stream, std::vector<Range> device_ranges, std::vector<Range> host_ranges,
               std::function<void()> work) {
    with_lock([&] {
      const auto found = queues_.find(stream);
      if (found == queues_.end() || found->second.device != device) return misuse("work in an unknown stream");
      found->second.work.push_back({std::move(device_ranges), std::move(host_ranges), std::move(work)});
    });
  }
  void run(Queue& queue, std::uint64_t end) {
    while (queue.begin < end && !queue.work.empty()) {
      const Work work = std::move(queue.work.front());
      queue.work.pop_front();
      ++queue.begin;
      bool possible = true;
      for (const auto& [address, bytes] : work.device_ranges) possible = possible && accessible(address, bytes);
      if (!possible) misuse("work on memory that is not there");
      for (const auto& [address, bytes] : work.host_ranges) {
        const bool pinned = unpinned_copies_ || is_registered(address, bytes);
        if (!pinned) misuse("work on host memory that is not pinned");
        possible = possible && pinned;
      }
      if (possible) work.run();
    }
  }
  void run_to(Event event) {
    const auto found = events_.find(event);
    if (found == events_.end()) return misuse("a wait for an unknown event");
    const auto queue = queues_.find(found->second.stream);
    if (queue != queues_.end()) run(queue->second, found->second.position);
  }
  [[nodiscard]] bool reserved(Address address, std::size_t bytes) const {
    auto found = reservations_.upper_bound(address);
    if (found == reservations_.begin()) return false;
    --found;
    return address + bytes <= found->first + found->second;
  }
  [[nodiscard]] bool accessible(Address address, std::size_t bytes) const {
    Address at = address;
    auto found = mappings_.upper_bound(address);
    if (found != mappings_.begin()) --found;
    for (; found != mappings_.end() && at < address + bytes; ++found) {
      const Address end = found->first + found->second.bytes;
      if (end <= at) continue;
      if (found->first > at || !found->second.accessible) return false;
      at = end;
    }
    return at >= address + bytes;
  }
  [[nodiscard]] bool is_registered(std::uintptr_t address, std::size_t bytes) const {
    auto found = registered_.upper_bound(address);
    if (found == registered_.begin()) return false;
    --found;
    return address + bytes <= found->first + found->second;
  }
  [[nodiscard]] bool in_use(std::uintptr_t address, std::size_t bytes) const {
    for (const auto& [stream, queue] : queues_) {
      for (const auto& work : queue.work) {
        for (const auto* ranges : {&work.device_ranges, &work.host_ranges}) {
          for (const auto& [at, size] : *ranges) {
            if (at < address + bytes && address < at + size) return true;
          }
        }
      }
    }
    return false;
  }

  std::unique_ptr<Driver> driver_;
  mutable std::recursive_mutex mutex_;
  std::vector<std::string> misuses_;
  Report* report_ = nullptr;
  const bool digests_;
  const bool packing_;
  bool unpinned_copies_ = false;
  bool links_ = true;
  std::size_t refusals_ = 0;
  bool holding_ = false;
  std::set<Address> stuck_;
  std::map<Address, std::size_t> reservations_;
  std::map<std::pair<int, Handle>, Owned> handles_;
  std::map<Address, Mapping> mappings_;
  std::map<Stream, Queue> queues_;
  std::map<Event, Point> events_;
  std::map<std::uintptr_t, std::size_t> registered_;
  std::uint64_t last_ = 0;
};

}  // namespace memsaver
