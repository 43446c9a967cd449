#include "faults/faulty_driver.hpp"

#include <chrono>
#include <utility>

namespace memsaver {

FaultyDriver::FaultyDriver(std::unique_ptr<Driver> driver) : driver_(std::move(driver)) {}

void FaultyDriver::fail(const std::string& call, std::size_t nth, ErrorKind kind, std::size_t times) {
  const std::lock_guard<std::mutex> lock(mutex_);
  faults_.push_back({call, counts_[call] + nth, kind, times});
}

void FaultyDriver::delay(const std::string& call, double seconds) {
  const std::lock_guard<std::mutex> lock(mutex_);
  delays_[call] = seconds;
}

void FaultyDriver::heal() {
  const std::lock_guard<std::mutex> lock(mutex_);
  faults_.clear();
  delays_.clear();
  failures_ = 0;
  lost_ = false;
  ++heals_;
  healed_.notify_all();
}

std::size_t FaultyDriver::failures() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failures_;
}

std::map<std::string, std::size_t> FaultyDriver::counts() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

void FaultyDriver::enter(const std::string& call) {
  std::unique_lock<std::mutex> lock(mutex_);
  const std::size_t count = ++counts_[call];
  const auto lose = [&] {
    const auto error = Error::from_driver(ErrorKind::context_lost, call, "ILLEGAL_ADDRESS", "injected");
    if (loss_.empty()) loss_ = error.what();
    return error;
  };
  if (lost_) throw lose();
  for (const auto& fault : faults_) {
    if (fault.call != call || count < fault.nth || count >= fault.nth + fault.times) continue;
    ++failures_;
    lost_ = fault.kind == ErrorKind::context_lost;
    switch (fault.kind) {
      case ErrorKind::out_of_device_memory:
      case ErrorKind::out_of_host_memory:
        throw Error::from_driver(fault.kind, call, "OUT_OF_MEMORY", "injected");
      case ErrorKind::context_lost:
        throw lose();
      default:
        throw Error::from_driver(fault.kind, call, "INVALID_VALUE", "injected");
    }
  }
  const auto delay = delays_.find(call);
  if (delay == delays_.end()) return;
  const std::size_t heals = heals_;
  healed_.wait_for(lock, std::chrono::duration<double>(delay->second), [&] { return heals_ != heals; });
}

bool FaultyDriver::in_host_memory() const noexcept { return driver_->in_host_memory(); }
int FaultyDriver::device_count() { return driver_->device_count(); }

DeviceInfo FaultyDriver::device_info(int device) {
  enter("device_info");
  return driver_->device_info(device);
}
bool FaultyDriver::links_directly(int device, const std::string& uuid) {
  enter("links_directly");
  return driver_->links_directly(device, uuid);
}
MemoryInfo FaultyDriver::memory_info(int device) {
  enter("memory_info");
  return driver_->memory_info(device);
}
Address FaultyDriver::reserve(int device, std::size_t bytes) {
  enter("reserve");
  return driver_->reserve(device, bytes);
}
void FaultyDriver::unreserve(int device, Address address, std::size_t bytes) {
  enter("unreserve");
  driver_->unreserve(device, address, bytes);
}
Handle FaultyDriver::create(int device, std::size_t bytes, bool exportable) {
  enter(exportable ? "create_exportable" : "create");
  return driver_->create(device, bytes, exportable);
}
void FaultyDriver::release(int device, Handle handle, std::size_t bytes) {
  enter("release");
  driver_->release(device, handle, bytes);
}
int FaultyDriver::export_handle(int device, Handle handle) {
  enter("export_handle");
  return driver_->export_handle(device, handle);
}
Handle FaultyDriver::import_handle(int device, int file, std::size_t bytes) {
  enter("import_handle");
  return driver_->import_handle(device, file, bytes);
}
void FaultyDriver::map(int device, Address address, std::size_t bytes, Handle handle) {
  enter("map");
  driver_->map(device, address, bytes, handle);
}
void FaultyDriver::allow_access(int device, Address address, std::size_t bytes, const std::vector<int>& peers) {
  enter("allow_access");
  driver_->allow_access(device, address, bytes, peers);
}
void FaultyDriver::unmap(int device, Address address, std::size_t bytes) {
  enter("unmap");
  driver_->unmap(device, address, bytes);
}
void FaultyDriver::synchronize(int device) {
  enter("synchronize");
  driver_->synchronize(device);
}
void FaultyDriver::trim_graph_memory(int device) {
  enter("trim_graph_memory");
  driver_->trim_graph_memory(device);
}
std::size_t FaultyDriver::graph_memory(int device) {
  enter("graph_memory");
  return driver_->graph_memory(device);
}
std::size_t FaultyDriver::stack_limit(int device) {
  enter("stack_limit");
  return driver_->stack_limit(device);
}
void FaultyDriver::set_stack_limit(int device, std::size_t bytes) {
  enter("set_stack_limit");
  driver_->set_stack_limit(device, bytes);
}
Stream FaultyDriver::create_stream(int device) {
  enter("create_stream");
  return driver_->create_stream(device);
}
void FaultyDriver::destroy_stream(int device, Stream stream) {
  enter("destroy_stream");
  driver_->destroy_stream(device, stream);
}
void FaultyDriver::copy_to_host(int device, void* to, Address from, std::size_t bytes, Stream stream) {
  enter("copy_to_host");
  driver_->copy_to_host(device, to, from, bytes, stream);
}
void FaultyDriver::copy_on_device(int device, Address to, Address from, std::size_t bytes, Stream stream) {
  enter("copy_on_device");
  driver_->copy_on_device(device, to, from, bytes, stream);
}

void FaultyDriver::copy_to_device(int device, Address to, const void* from, std::size_t bytes, Stream stream) {
  enter("copy_to_device");
  driver_->copy_to_device(device, to, from, bytes, stream);
}
void FaultyDriver::fill_zero(int device, Address address, std::size_t bytes, Stream stream) {
  enter("fill_zero");
  driver_->fill_zero(device, address, bytes, stream);
}
void FaultyDriver::digest(int device, const DigestKey& key, const DigestItem* items, std::size_t count, Digest* results,
                          Stream stream) {
  enter("digest");
  driver_->digest(device, key, items, count, results, stream);
}
void FaultyDriver::prepare_digest(int device) noexcept { driver_->prepare_digest(device); }
bool FaultyDriver::has_digest(int device) noexcept { return driver_->has_digest(device); }
void FaultyDriver::sample(int device, const PackItem* items, std::size_t count, ExponentSample* samples,
                          Stream stream) {
  enter("sample");
  driver_->sample(device, items, count, samples, stream);
}
void FaultyDriver::pack(int device, const PackPlan& plan, const PackItem& content, const PackItem& room,
                        std::uint64_t* packed_bytes, Stream stream) {
  enter("pack");
  driver_->pack(device, plan, content, room, packed_bytes, stream);
}
void FaultyDriver::unpack(int device, const PackItem& packed, const PackItem& content, std::uint64_t* damaged,
                          Stream stream) {
  enter("unpack");
  driver_->unpack(device, packed, content, damaged, stream);
}
void FaultyDriver::prepare_packing(int device) noexcept {
  try {
    enter("prepare_packing");
    driver_->prepare_packing(device);
  } catch (const Error&) {  // then nothing is prepared
  }
}
bool FaultyDriver::has_packing(int device) noexcept {
  try {
    enter("has_packing");
    return driver_->has_packing(device);
  } catch (const Error&) {
    return false;
  }
}
Event FaultyDriver::record(int device, Stream stream) {
  enter("record");
  return driver_->record(device, stream);
}
bool FaultyDriver::done(int device, Event event) {
  enter("done");
  return driver_->done(device, event);
}
void FaultyDriver::wait(int device, Event event) {
  enter("wait");
  driver_->wait(device, event);
}
void FaultyDriver::recycle(int device, Event event) noexcept { driver_->recycle(device, event); }
void FaultyDriver::stream_wait(int device, Stream stream, Event event) {
  enter("stream_wait");
  driver_->stream_wait(device, stream, event);
}
void FaultyDriver::register_host(void* address, std::size_t bytes) {
  enter("register_host");
  driver_->register_host(address, bytes);
}
void FaultyDriver::unregister_host(void* address) {
  enter("unregister_host");
  driver_->unregister_host(address);
}
std::string FaultyDriver::loss() const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!loss_.empty()) return loss_;
  }
  return driver_->loss();
}
std::vector<std::pair<int, int>> FaultyDriver::accounts() { return driver_->accounts(); }

}  // namespace memsaver
