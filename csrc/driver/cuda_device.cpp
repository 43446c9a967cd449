#include "driver/cuda_device.hpp"

#include <utility>

#include "driver/digest_kernel.hpp"
#include "driver/nvrtc.hpp"
#include "support/error.hpp"
#include "support/log.hpp"

namespace memsaver::cuda {

void Calls::check(const char* symbol, Result result) const {
  if (result == kSuccess) return;
  try {
    fail(api, symbol, result);
  } catch (const Error& error) {
    if (error.kind == ErrorKind::context_lost) {
      const Lock lock(mutex_);
      if (loss_.empty()) loss_ = error.what();
    }
    throw;
  }
}

std::string Calls::loss() const {
  const Lock lock(mutex_);
  return loss_;
}

CudaDevice::CudaDevice(const Calls& calls, int index) : calls_(calls) {
  calls_.check("cuDeviceGet", calls_.api.device_get(&ordinal_, index));
}

int CudaDevice::attribute(int which, int otherwise) const {
  int value = otherwise;
  return calls_.api.device_get_attribute(&value, which, ordinal_) == kSuccess ? value : otherwise;
}

Context CudaDevice::retained() {
  if (context_ == nullptr) {
    calls_.check("cuDevicePrimaryCtxRetain", calls_.api.primary_context_retain(&context_, ordinal_));
  }
  return context_;
}

Context CudaDevice::context() {
  const Lock lock(mutex_);
  return retained();
}

bool CudaDevice::has_context() {
  const Lock lock(mutex_);
  return context_ != nullptr;
}

AllocationProperties CudaDevice::properties() {
  const Lock lock(mutex_);
  if (properties_.type == 0) {
    if (attribute(kAttributeVirtualMemory, 0) == 0) {
      throw Error(ErrorKind::configuration, "the device does not support CUDA virtual memory management");
    }
    properties_.type = kAllocationPinned;
    properties_.location = {kLocationDevice, ordinal_};
    properties_.flags.gpu_direct_rdma_capable = attribute(kAttributeRdmaWithVirtualMemory, 0) != 0 ? 1 : 0;
  }
  return properties_;
}

EventHandle CudaDevice::idle_event() {
  const Lock lock(mutex_);
  if (idle_events_.empty()) return nullptr;
  const EventHandle event = idle_events_.back();
  idle_events_.pop_back();
  return event;
}

void CudaDevice::recycle(EventHandle event) {
  const Lock lock(mutex_);
  idle_events_.push_back(event);
}

bool CudaDevice::digest_is_known() const { return digest_state_ != DigestState::unknown || !digest_code_.empty(); }

void CudaDevice::prepare_digest() noexcept {
  try {
    {
      const Lock lock(mutex_);
      if (digest_is_known()) return;
    }
    std::string code = compile_digest();  // a quarter of a second, without the lock
    const Lock lock(mutex_);
    if (!digest_is_known()) digest_code_ = std::move(code);
  } catch (const std::exception&) {
    // has_digest() tries again, and warns.
  }
}

bool CudaDevice::has_digest() noexcept {
  const Lock lock(mutex_);
  if (digest_state_ == DigestState::unknown) {
    try {
      load_digest();
      digest_state_ = DigestState::ready;
    } catch (const std::exception& error) {
      digest_state_ = DigestState::missing;
      warn(std::string("content digests are off: every release copies everything, and nothing is verified: ") +
           error.what());
    }
  }
  return digest_state_ == DigestState::ready;
}

void CudaDevice::load_digest() {
  const BesideCaptures beside_captures(calls_.api);
  const CurrentContext current(calls_, retained());
  const std::string code = digest_code_.empty() ? compile_digest() : std::move(digest_code_);
  Module module = nullptr;
  calls_.check("cuModuleLoadData", calls_.api.module_load_data(&module, code.data()));
  calls_.check("cuModuleGetFunction", calls_.api.module_get_function(&digest_, module, kDigestKernelName));
}

Function CudaDevice::digest_kernel() {
  const Lock lock(mutex_);
  return digest_;
}

std::string CudaDevice::compile_digest() const {
  const std::string architecture = "sm_" + std::to_string(attribute(kAttributeComputeMajor, 0)) +
                                   std::to_string(attribute(kAttributeComputeMinor, 0));
  return compile(kDigestKernelSource, architecture);
}

}  // namespace memsaver::cuda
