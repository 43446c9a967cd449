"""Device memory in use: as nvidia-smi shows it, what the driver keeps for graphs, and what torch counts."""

from __future__ import annotations

import os
from collections.abc import Collection

from memsaver_core import _native, communicators, graphs, hibernation, nvml, process
from memsaver_core.backends import Backend
from memsaver_core.contract.status import CommunicatorStatus, DeviceMemory, TorchMemory

_last: dict[int, DeviceMemory] = {}  # by device


def read_devices() -> tuple[DeviceMemory, ...]:
    """Read every device on which this process has used memsaver (the first one if it has used none yet). On CUDA the
    figures are NVML's, or the driver's if NVML is unavailable. On the host driver, ``used_bytes`` counts all processes
    that share the device, and ``process_bytes`` is the resident memory of this one. Raises MemsaverError if
    one cannot be read."""
    if not process.enabled():
        return ()
    saver, backend = process.saver(), process.backend()
    return tuple(_read(saver, backend, index) for index in saver.devices() or [0])


def _read(saver: _native.Saver, backend: Backend, index: int) -> DeviceMemory:
    if not backend.has_context:
        return backend.read_device(saver, index)
    with hibernation.device_lock:
        if not hibernation.is_away():
            _last[index] = memory = backend.read_device(saver, index)
            return memory
    _last[index] = memory = read_again(_last[index], {os.getpid()})
    return memory


def read_again(last: DeviceMemory, pids: Collection[int]) -> DeviceMemory:
    """Read a device again. ``last`` is what one of the processes ``pids`` read earlier, returned as it is if NVML is
    unavailable; ``process_bytes`` are those of all of them."""
    with hibernation.device_lock:
        away = hibernation.is_away()
        figures = None if away else nvml.read_memory(last.uuid, pids)
    if away:
        # NVML calls block until this process wakes, so the helper reads. While it is busy, the last figures stand.
        figures = hibernation.read_memory(last.uuid, pids)
    if figures is None:
        return last
    total, used, own = figures
    return last.model_copy(update={"total_bytes": total, "used_bytes": used, "process_bytes": own})


def read_communicators() -> tuple[CommunicatorStatus, ...]:
    """Find the NCCL communicators and count what they hold; while hibernated, return the last figures."""
    with hibernation.device_lock:
        return communicators.statuses() if hibernation.is_away() else communicators.found()


def graph_memory_bytes(index: int) -> int:
    """Return the bytes that captured graphs hold of a device beside their tensors: the sum of two figures.

    The first is the growth of this process's device memory during each capture by ``memsaver_core.graph``; it is 0 if
    NVML does not count by process. The second is what the driver holds for allocations inside of graphs; it is 0 while
    hibernated. Graphs captured otherwise are not counted.
    """
    saver = process.existing_saver()
    pool = 0
    if saver is not None and process.backend().has_context:
        with hibernation.device_lock:
            pool = 0 if hibernation.is_away() else saver.graph_memory(index)
    return pool + sum(nbytes for device, nbytes in list(graphs.grown.values()) if device == index)


def read_torch_memory(index: int) -> TorchMemory:
    """Return what torch holds of device ``index``. Calls no driver; all zero if torch does not use CUDA."""
    return process.backend().read_torch_memory(process.existing_saver(), index)
