// Compares our declarations of the CUDA driver API with the toolkit's; compiled if cuda.h is present.

#include <cuda.h>

#include <cstddef>

#include "driver/cuda_api.hpp"

namespace ours = memsaver::cuda;

static_assert(sizeof(ours::Uuid) == sizeof(CUuuid));
static_assert(sizeof(ours::DevicePointer) == sizeof(CUdeviceptr));
static_assert(sizeof(memsaver::Handle) == sizeof(CUmemGenericAllocationHandle));
static_assert(sizeof(memsaver::Stream) == sizeof(CUstream) && sizeof(memsaver::Event) == sizeof(CUevent));
static_assert(sizeof(ours::AllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(ours::AllocationProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(ours::AllocationProperties, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(offsetof(ours::AllocationProperties, flags.gpu_direct_rdma_capable) ==
              offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
static_assert(sizeof(ours::AccessDescriptor) == sizeof(CUmemAccessDesc));
static_assert(offsetof(ours::AccessDescriptor, flags) == offsetof(CUmemAccessDesc, flags));

static_assert(ours::kSuccess == CUDA_SUCCESS && ours::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(ours::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(ours::kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(ours::kHandleFileDescriptor == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
static_assert(ours::kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(ours::kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
static_assert(ours::kGranularityMinimum == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
static_assert(ours::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(ours::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(ours::kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(ours::kHostRegisterDeviceMap == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(ours::kCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(sizeof(CUstreamCaptureMode) == sizeof(int));
static_assert(ours::kLimitStackSize == CU_LIMIT_STACK_SIZE);
static_assert(ours::kGraphMemReservedCurrent == CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT);
static_assert(ours::kPointerAccessFlags == CU_POINTER_ATTRIBUTE_ACCESS_FLAGS);
static_assert(ours::kAttributeComputeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(ours::kAttributeComputeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(ours::kAttributeVirtualMemory == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
static_assert(ours::kAttributeRdmaWithVirtualMemory == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
static_assert(ours::kAttributeHostNumaId == CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);

int main() { return 0; }
