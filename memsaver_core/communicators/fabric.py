"""NVLink memory of NCCL that a suspend does not cover and no checkpoint is known to: multicast, and between hosts."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache

from memsaver_core import nvml

#: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED of cuda.h.
_MULTICAST_SUPPORTED = 132


def obstacle(name: str, device: int, uuid: str) -> str:
    """Return why a process with the communicator ``name`` cannot be hibernated and what to do, or an empty string.

    NCCL does not report which memory it uses, so this checks what makes it use multicast (NVLS) or memory of other
    hosts (MNNVL): its settings and the device.

    Args:
        device, uuid: torch's index of the communicator's device, and the driver's identifier of it.
    """
    found = []
    if os.environ.get("NCCL_NVLS_ENABLE") != "0" and _multicast_supported(device):
        found.append(("NVLink multicast memory (NVLS)", "NCCL_NVLS_ENABLE"))
    if os.environ.get("NCCL_MNNVL_ENABLE") != "0" and nvml.in_multi_node_fabric(uuid):
        found.append(("NVLink memory of other hosts (MNNVL)", "NCCL_MNNVL_ENABLE"))
    if not found:
        return ""
    memory = " and ".join(each for each, _ in found)
    settings = " ".join(f"{variable}=0" for _, variable in found)
    return (
        f"NCCL communicator {name} may use {memory}, which stays when it is suspended and cannot be checkpointed; set "
        f"{settings} before the engine starts"
    )


@lru_cache
def _multicast_supported(device: int) -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    handle, value = ctypes.c_int(), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(handle), device) != 0:  # torch and the driver number devices alike
        return False
    return driver.cuDeviceGetAttribute(ctypes.byref(value), _MULTICAST_SUPPORTED, handle) == 0 and value.value != 0
