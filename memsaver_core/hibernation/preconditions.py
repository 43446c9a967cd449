"""What must hold before this process can be hibernated. The CUDA driver does not promise to leave a process intact that
it cannot checkpoint, so all that can be seen from here is checked first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memsaver_core import _native, communicators, process, shared_buffers
from memsaver_core.contract.errors import MemsaverError
from memsaver_core.hibernation import helper

#: The first driver that can checkpoint (CUDA 12.8).
OLDEST_DRIVER = "570"

#: CUDA maps the device file of unified memory below this address for its own use, above it for managed memory.
_FIRST_MANAGED = 1 << 40

_checks: list[Callable[[], list[str]]] = []


def register_check(check: Callable[[], list[str]]) -> None:
    """Have ``check`` called before each hibernation, while device calls still go on. It returns what prevents the
    hibernation and what to do, one string for each obstacle: what only an integration can see of its engine."""
    _checks.append(check)


def obstacles(suspending: bool = False) -> list[str]:
    """Return what ``Hibernation.obstacles`` returns. Creates no device context; must not be called while hibernated, as
    CUDA calls block."""
    backend, found = process.backend(), list[str]()
    if not os.access(helper.PATH, os.X_OK):
        found.append(f"the helper program {helper.PATH} is missing or may not be run; install memsaver again")
    for each in communicators.found():
        if not each.suspended and (each.obstacle or not suspending):
            remedy = each.obstacle or "suspend it first"
            found.append(f"communicator {each.name} is alive: {remedy}, or destroy it")
    if not suspending and (imported := shared_buffers.imported_bytes()):
        found.append(
            f"{imported} bytes of other processes' device memory are mapped, with which a checkpoint could "
            "never be restored; drop the imported buffers first"
        )
    found += [*communicators.shared(), *(reason for check in _checks for reason in check())]
    if not backend.has_context:
        return found
    if not _native.can_checkpoint():
        found.append(f"the NVIDIA driver cannot checkpoint processes; version {OLDEST_DRIVER} or later is needed")
    if pipe := mps_pipe():
        found.append(f"the process runs under CUDA MPS ({pipe}), which cannot be checkpointed; run it without MPS")
    if tensors := ipc_tensors():
        found.append(f"{tensors} tensors are shared with other processes by CUDA IPC; drop them first")
    if peers := backend.peers(process.existing_saver(), process.core_settings().peer_access):
        pairs = ", ".join(f"{one} to {other}" for one, other in peers)
        found.append(
            f"devices reach each other's memory ({pairs}); keep one device to a process, without MEMSAVER_PEER_ACCESS"
        )
    if nbytes := managed_bytes():
        found.append(f"{nbytes} bytes of managed memory are in use; free it first")
    return found


def mps_pipe() -> str:
    """Return the pipe through which a CUDA context of this process reaches an MPS daemon, or an empty string."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps") / "control"  # CUDA's default folder
    return str(pipe) if pipe.exists() else ""


def ipc_tensors() -> int:
    """Return how many live tensors torch shares with other processes by CUDA IPC."""
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is None:
        return 0
    shared = list(reductions.shared_cache.items())
    return sum(_is_cuda_handle(key) and not storage.expired() for key, storage in shared)


def managed_bytes() -> int:
    """Return the bytes of managed memory of this process, in use or cached by CUDA; raise MemsaverError if it may open
    no more files. The driver maps managed memory from the unified-memory device file, at an offset equal to the
    address. An ordinary context maps that file only for semaphores, below ``_FIRST_MANAGED``."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError as error:
        raise MemsaverError(f"cannot look for managed memory: {error}; repeat the call when it can") from error
    size = 0
    for line in lines:
        if not line.endswith("/dev/nvidia-uvm"):
            continue
        span, _, offset = line.split()[:3]
        begin, end = (int(address, 16) for address in span.split("-"))
        if int(offset, 16) == begin and begin >= _FIRST_MANAGED:
            size += end - begin
    return size


def _is_cuda_handle(key: object) -> bool:
    """Return whether torch's key of shared memory is a CUDA handle; those of host memory are numbers or file names."""
    handle = key[0] if isinstance(key, tuple) and key else key
    return isinstance(handle, bytes) and not handle.startswith(b"/torch_")
