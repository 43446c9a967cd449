"""What must hold before this process can be hibernated. The CUDA driver does not promise to leave a process intact that
it cannot checkpoint, so all that can be seen from here is checked first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memsaver_core import _native, communicators, process, shared_buffers
from memsaver_core.contract.errors import MemsaverError
from memsaver_core.contract.status import CommunicatorStatus
from memsaver_core.hibernation import helper

#: The first driver that can checkpoint (CUDA 12.8).
OLDEST_DRIVER = "570"

#: CUDA maps the device file of unified memory below this address for its own use, above it for managed memory.
_FIRST_MANAGED = 1 << 40

_checks: list[Callable[[], list[str]]] = []


@dataclass(frozen=True)
class Facts:
    """What was found of this process."""

    has_context: bool = True  # the process has a context on the device; if not, fewer checks apply
    helper: bool = True  # the helper program exists and may be run
    can_checkpoint: bool = True  # the NVIDIA driver has the checkpoint calls
    mps: str = ""  # the pipe of a CUDA MPS daemon that this process computes through
    communicators: tuple[CommunicatorStatus, ...] = ()  # NCCL's, of more than one rank
    ipc_tensors: int = 0  # shared with other processes by CUDA IPC, exported or imported
    peers: tuple[tuple[int, int], ...] = ()  # pairs of devices of which the first reaches the second's memory
    managed_bytes: int = 0  # of managed memory (cudaMallocManaged), by any library
    imported_bytes: int = 0  # of other processes' device memory, mapped by memsaver_core.shared_buffers
    sharing: tuple[str, ...] = ()  # what else ranks share of device memory
    others: tuple[str, ...] = ()  # what registered checks found


def register_check(check: Callable[[], list[str]]) -> None:
    """Have ``check`` called before each hibernation, while device calls still go on. It returns what prevents the
    hibernation and what to do, one string for each obstacle: what only an integration can see of its engine."""
    _checks.append(check)


def obstacles(facts: Facts, suspending: bool = False) -> list[str]:
    """Return what ``Hibernation.obstacles`` returns in a process with these ``facts``."""
    found = []
    if not facts.helper:
        found.append(f"the helper program {helper.PATH} is missing or may not be run; install memsaver again")
    for each in facts.communicators:
        if not each.suspended and (each.obstacle or not suspending):
            remedy = each.obstacle or "suspend it first"
            found.append(f"communicator {each.name} is alive: {remedy}, or destroy it")
    if facts.imported_bytes and not suspending:
        found.append(
            f"{facts.imported_bytes} bytes of other processes' device memory are mapped, with which a checkpoint could "
            "never be restored; drop the imported buffers first"
        )
    found += [*facts.sharing, *facts.others]
    if not facts.has_context:
        return found
    if not facts.can_checkpoint:
        found.append(f"the NVIDIA driver cannot checkpoint processes; version {OLDEST_DRIVER} or later is needed")
    if facts.mps:
        found.append(f"the process runs under CUDA MPS ({facts.mps}), which cannot be checkpointed; run it without MPS")
    if facts.ipc_tensors:
        found.append(f"{facts.ipc_tensors} tensors are shared with other processes by CUDA IPC; drop them first")
    if facts.peers:
        pairs = ", ".join(f"{one} to {other}" for one, other in facts.peers)
        found.append(
            f"devices reach each other's memory ({pairs}); keep one device to a process, without MEMSAVER_PEER_ACCESS"
        )
    if facts.managed_bytes:
        found.append(f"{facts.managed_bytes} bytes of managed memory are in use; free it first")
    return found


def observe() -> Facts:
    """Look at this process. Creates no device context; must not be called while hibernated, as CUDA calls block."""
    backend = process.backend()
    return Facts(
        has_context=backend.has_context,
        helper=os.access(helper.PATH, os.X_OK),
        can_checkpoint=backend.has_context and _native.can_checkpoint(),
        mps=mps_pipe(),
        communicators=communicators.found(),
        ipc_tensors=ipc_tensors(),
        peers=backend.peers(process.existing_saver(), process.core_settings().peer_access),
        managed_bytes=managed_bytes() if backend.has_context else 0,
        imported_bytes=shared_buffers.imported_bytes(),
        sharing=communicators.shared(),
        others=tuple(found for check in _checks for found in check()),
    )


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
