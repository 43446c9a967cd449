"""Device memory in use, as nvidia-smi shows it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any

from memsaver_core import _native, hibernation, process
from memsaver_core.reports import DeviceMemory

_last: dict[int, DeviceMemory] = {}  # by device


def read_devices() -> tuple[DeviceMemory, ...]:
    """Read every device on which this process has used memsaver (the first one where it has not used any yet).

    On CUDA the figures are NVML's, devices matched by UUID so that CUDA_VISIBLE_DEVICES makes no difference; where NVML
    cannot be used they are the CUDA driver's own. On the host driver, ``used_bytes`` is the host device's count over
    all processes that share it, and ``process_bytes`` the resident memory of this process (None where the process may
    open no more files: a resume must work without).
    """
    if not process.enabled():
        return ()
    saver = process.saver()
    read = _read_cuda if saver.driver_name() == "cuda" else _read_host
    return tuple(read(saver, index) for index in saver.devices() or [0])


def read_graph_pool(index: int) -> int:
    """What the driver holds of a device for allocations inside of CUDA graphs; 0 while nobody may ask it."""
    saver = process.existing_saver()
    if saver is None or saver.driver_name() != "cuda":
        return 0
    with hibernation.device_lock:
        return 0 if hibernation.is_away() else saver.graph_memory(index)


def _read_host(saver: _native.Saver, index: int) -> DeviceMemory:
    info = saver.device_info(index)
    free, total = saver.memory_info(index)
    return DeviceMemory(index, info["uuid"], info["name"], total, total - free, _resident_bytes())


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def _read_cuda(saver: _native.Saver, index: int) -> DeviceMemory:
    with hibernation.device_lock:
        if not hibernation.is_away():
            _last[index] = reading = _read_nvml(saver, index)
            return reading
    # Here NVML would wait until the process wakes. While the helper is busy hibernating it, the last reading stands.
    last = _last[index]
    told = hibernation.read_memory(last.uuid)
    if told is not None:
        total, used, own = told
        _last[index] = last = replace(last, total_bytes=total, used_bytes=used, process_bytes=own)
    return last


def read_again(last: DeviceMemory, pids: frozenset[int]) -> DeviceMemory:
    """Read a device of other processes, known by an earlier reading of theirs; that one where NVML cannot be used.

    Args:
        last: the earlier reading.
        pids: the processes whose memory is ``process_bytes``.
    """
    told = _told_by_nvml(last.uuid, pids)
    if told is None:
        return last
    total, used, own = told
    return replace(last, total_bytes=total, used_bytes=used, process_bytes=own)


def _read_nvml(saver: _native.Saver, index: int) -> DeviceMemory:
    info = _device_info(saver, index)
    uuid, name = info["uuid"], info["name"]
    told = _told_by_nvml(uuid, {os.getpid()})
    if told is None:
        free, total = saver.memory_info(index)
        return DeviceMemory(index, uuid, name, total, total - free, None)
    return DeviceMemory(index, uuid, name, *told)


def _told_by_nvml(uuid: str, pids: Collection[int]) -> tuple[int, int, int | None] | None:
    """Bytes in all, in use, and in use by these processes; None where NVML cannot be used, or does not tell now."""
    handle = _nvml_handle(uuid)
    if handle is None:
        return None
    import pynvml

    try:
        # Version 2 counts what the driver reserves for itself apart from what is used, as nvidia-smi does.
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError:  # the driver may have been replaced under a running process
        return None
    return int(memory.total), int(memory.used), _process_bytes(handle, pids)


@lru_cache
def _device_info(saver: _native.Saver, index: int) -> dict[str, Any]:
    return saver.device_info(index)


@lru_cache
def _nvml_handle(uuid: str) -> Any:
    """NVML's handle of the device, or None where NVML cannot be used or does not know it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:  # NVML missing, or a MIG slice, which NVML calls by another name
        return None


def _process_bytes(handle: Any, pids: Collection[int]) -> int | None:
    import pynvml

    told: int | None = None
    with contextlib.suppress(pynvml.NVMLError):
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid in pids and process.usedGpuMemory is not None:
                told = (told or 0) + int(process.usedGpuMemory)
    return told
