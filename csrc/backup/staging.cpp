#include "backup/staging.hpp"

#include <algorithm>
#include <string>

#include "support/log.hpp"
#include "support/scope_exit.hpp"

namespace memsaver {

Staging::Staging(Driver& driver, int device, HostPool& pool, FileStore& files, SharedStore* store, const DigestKey& key,
                 bool pack)
    : driver_(driver),
      device_(device),
      pool_(pool),
      files_(files),
      store_(store),
      key_(key),
      packing_(driver, device, pack) {
  copies_ = driver_.create_stream(device_);
  try {
    kernels_ = driver_.create_stream(device_);
  } catch (...) {
    destroy_stream(copies_);
    throw;
  }
}

Staging::~Staging() {
  FileTransfers none;
  settle(none);
  digests_.reset();
  destroy_stream(copies_);
  destroy_stream(kernels_);
}

void Staging::destroy_stream(Stream stream) noexcept {
  try {
    driver_.destroy_stream(device_, stream);
  } catch (const std::exception& error) {
    warn(std::string("a stream was not destroyed: ") + error.what());  // at process exit the context may be gone
  }
}

bool Staging::can_digest() {
  if (!driver_.has_digest(device_)) return false;
  if (!digests_) digests_ = std::make_unique<DigestQueue>(driver_, device_, key_, kernels_);
  return true;
}

void Staging::copy(Direction direction, Address base, const std::vector<Extent>& extents,
                   const std::vector<HostRange>& memory) {
  for_each_piece(extents, memory, [&](std::size_t offset, std::uintptr_t address, std::size_t bytes) {
    auto* const host_address = reinterpret_cast<void*>(address);
    if (direction == Direction::to_host) {
      driver_.copy_to_host(device_, host_address, base + offset, bytes, copies_);
    } else {
      driver_.copy_to_device(device_, base + offset, host_address, bytes, copies_);
    }
  });
}

void Staging::wait_for(Stream stream) {
  const Event end = driver_.record(device_, stream);
  const ScopeExit recycle([&] { driver_.recycle(device_, end); });
  driver_.wait(device_, end);
}

void Staging::wait_for_streams() {
  wait_for(copies_);
  wait_for(kernels_);
}

void Staging::settle(FileTransfers& transfers) noexcept {
  for (const auto& transfer : transfers) {
    if (transfer.done.valid()) transfer.done.wait();
  }
  if (digests_) digests_->abandon();
  try {
    wait_for_streams();
  } catch (const std::exception& error) {
    warn(std::string("while waiting for copies to end: ") + error.what());
    // A device that cannot be synchronized either has lost its context and runs nothing any more.
    try {
      driver_.synchronize(device_);
    } catch (const std::exception& failure) {
      warn(std::string("while waiting for the device: ") + failure.what());
    }
  }
  give_bounce(transfers);
  try {
    packing_.close();
  } catch (const std::exception&) {
    // The context is lost, and the device's memory with it.
  }
}

void Staging::give_bounce(FileTransfers& transfers) {
  for (const auto& transfer : transfers) pool_.give(transfer.bounce, HostPool::Use::passing);
  transfers.clear();
}

}  // namespace memsaver
