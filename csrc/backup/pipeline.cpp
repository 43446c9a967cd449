#include "backup/pipeline.hpp"

#include "support/error.hpp"
#include "support/log.hpp"

namespace memsaver {

bool Pipeline::can_digest() {
  if (!driver.has_digest(device)) return false;
  if (!digests_) digests_ = std::make_unique<DigestQueue>(driver, device, key, kernels);
  return true;
}

void Pipeline::copy(Direction direction, Address base, const std::vector<Extent>& extents,
                    const std::vector<HostRange>& memory) {
  for_each_piece(extents, memory, [&](std::size_t offset, std::uintptr_t address, std::size_t bytes) {
    auto* const host_address = reinterpret_cast<void*>(address);
    if (direction == Direction::to_host) {
      driver.copy_to_host(device, host_address, base + offset, bytes, copies);
    } else {
      driver.copy_to_device(device, base + offset, host_address, bytes, copies);
    }
  });
}

std::unique_ptr<HostPool::Bounce> Pipeline::bounce(std::size_t bytes, bool alone) {
  try {
    const auto use = alone ? HostPool::Use::must_pass : HostPool::Use::passing;
    return std::make_unique<HostPool::Bounce>(pool, bytes, use);
  } catch (const Error& error) {
    if (alone || error.kind != ErrorKind::out_of_host_memory) throw;
    return nullptr;
  }
}

void Pipeline::wait_for_streams() {
  record(copies)->wait();
  record(kernels)->wait();
}

void Pipeline::quiesce(const FileTransfers& transfers) noexcept {
  for (const auto& transfer : transfers) {
    if (transfer.done.valid()) transfer.done.wait();
  }
  if (digests_) digests_->abandon();
  try {
    wait_for_streams();
  } catch (const std::exception& error) {
    warn(std::string("while waiting for copies to end: ") + error.what());
    // A device that cannot be synchronized, either, has lost its context and runs nothing.
    try {
      driver.synchronize(device);
    } catch (const std::exception& failure) {
      warn(std::string("while waiting for the device: ") + failure.what());
    }
  }
  try {
    packing.close();
  } catch (const std::exception&) {
    // The context is lost, and the device's memory with it.
  }
}

}  // namespace memsaver
