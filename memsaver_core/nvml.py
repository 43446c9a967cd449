"""What NVML says of a device: its memory in use as nvidia-smi shows it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

_handles: dict[str, Any] = {}  # by uuid


def read_memory(uuid: str, pids: Collection[int]) -> tuple[int, int, int | None] | None:
    """Return the bytes of the device ``uuid`` that processes can use, those that they use, and those that ``pids`` use
    (None if NVML does not say); None as a whole if NVML is unavailable."""
    # Version 2 counts what the driver reserves for itself (500 MiB of an H100) apart from what is used, as nvidia-smi
    # does, but in the total.
    memory = _ask(uuid, lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2))
    if memory is None:
        return None
    processes = _ask(uuid, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()
    own = [int(each.usedGpuMemory) for each in processes if each.pid in pids and each.usedGpuMemory is not None]
    return int(memory.total - memory.reserved), int(memory.used), sum(own) if own else None


@lru_cache
def in_multi_node_fabric(uuid: str) -> bool:
    """Return whether NVLink connects the device ``uuid`` with those of other hosts (as in GB200 NVL72)."""

    def connected(nvml: Any, handle: Any) -> bool:
        fabric = nvml.c_nvmlGpuFabricInfoV_t()
        fabric.version = nvml.nvmlGpuFabricInfo_v2
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(fabric))
        return fabric.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED and any(fabric.clusterUuid)

    return bool(_ask(uuid, connected))


def _ask(uuid: str, call: Callable[[Any, Any], Any]) -> Any:
    """Return ``call(pynvml, handle)``; None if NVML refuses: the driver may have been replaced under this process."""
    if (handle := _handle(uuid)) is None:
        return None
    import pynvml

    try:
        return call(pynvml, handle)
    except pynvml.NVMLError:
        return None


def _handle(uuid: str) -> Any:
    """Return NVML's handle of the device, or None if NVML does not know it or is unavailable now."""
    if uuid not in _handles:
        try:
            import pynvml

            pynvml.nvmlInit()
            _handles[uuid] = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except Exception as error:  # perhaps only now, if no file can be opened
            if type(error).__name__ not in ("NVMLError_NotFound", "NVMLError_InvalidArgument"):
                return None
            _handles[uuid] = None  # a MIG slice, which NVML calls by another name
    return _handles[uuid]
