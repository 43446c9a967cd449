"""What keeps this process from being hibernated: looked at before anything is done.

The CUDA driver does not promise to leave a process in a good state that it finds it cannot checkpoint. So what can be
told from here is refused by us, before the driver is asked.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memsaver_core import _native, process
from memsaver_core.hibernation import helper

#: The first driver that can checkpoint (CUDA 12.8).
OLDEST_DRIVER = "570"

#: CUDA's own mappings of unified memory's device file lie below this address, those of managed memory above.
_FIRST_MANAGED = 1 << 40

#: Where an MPS daemon that was not told otherwise has its pipes.
_MPS_FOLDER = "/tmp/nvidia-mps"


@dataclass(frozen=True)
class Facts:
    """What was found of this process.

    Attributes:
        driver: memsaver's: ``cuda``, ``host`` or ``none``.
        helper: whether the helper's program is there and may be run.
        can_checkpoint: whether the NVIDIA driver has the calls.
        mps: the pipe of a CUDA MPS daemon that this process computes through, or an empty string.
        nccl_groups: names of torch's process groups on NCCL.
        ipc_tensors: tensors shared with other processes by CUDA IPC, either way.
        peers: pairs of devices of which the first reaches the second's memory.
        managed_bytes: managed memory (``cudaMallocManaged``), whoever allocated it.
    """

    driver: str = "cuda"
    helper: bool = True
    can_checkpoint: bool = True
    mps: str = ""
    nccl_groups: tuple[str, ...] = ()
    ipc_tensors: int = 0
    peers: tuple[tuple[int, int], ...] = ()
    managed_bytes: int = 0


def reasons(facts: Facts) -> list[str]:
    """Why a process of which ``facts`` hold cannot be hibernated, each with what to do."""
    if facts.driver == "none":
        return ["memsaver is disabled (MEMSAVER_ENABLED=0)"]
    found = []
    if not facts.helper:
        found.append(f"the helper program {helper.PATH} is missing or may not be run; install memsaver again")
    if facts.driver != "cuda":
        return found
    if not facts.can_checkpoint:
        found.append(f"the NVIDIA driver cannot checkpoint processes; version {OLDEST_DRIVER} or later is needed")
    if facts.mps:
        found.append(f"the process runs under CUDA MPS ({facts.mps}), which cannot be checkpointed; run it without MPS")
    if facts.nccl_groups:
        named = ", ".join(map(repr, facts.nccl_groups))
        found.append(f"NCCL communicators are alive ({named}); destroy the process groups first")
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
    """Look at this process. Creates no device context; on CUDA it must not be hibernated, or the look would wait."""
    if not process.enabled():
        return Facts(driver="none")
    has_helper = os.access(helper.PATH, os.X_OK)
    backend = process.backend()
    if not backend.has_context:
        return Facts(driver="host", helper=has_helper)
    return Facts(
        helper=has_helper,
        can_checkpoint=_native.can_checkpoint(),
        mps=mps_pipe(),
        nccl_groups=nccl_groups(),
        ipc_tensors=ipc_tensors(),
        peers=backend.peers(process.existing_saver(), process.settings().peer_access),
        managed_bytes=managed_bytes(),
    )


def mps_pipe() -> str:
    """The pipe through which a CUDA context of this process goes to an MPS daemon, or an empty string."""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_FOLDER) / "control"
    return str(pipe) if pipe.exists() else ""


def nccl_groups() -> tuple[str, ...]:
    """Names of torch's process groups on NCCL, but for those of one process, which has nobody to share memory with.

    Communicators made behind torch's back are not seen.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not torch.distributed.is_available():
        return ()
    world = c10d._world
    return tuple(
        str(world.pg_names.get(group, "default"))
        for group in world.pg_map
        if "nccl" in str(world.pg_backend_config.get(group, "")) and group.size() > 1
    )


def ipc_tensors() -> int:
    """How many tensors that live are shared with other processes by CUDA IPC, by torch."""
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is None:
        return 0
    shared = list(reductions.shared_cache.items())
    return sum(_is_cuda_handle(key) and not storage.expired() for key, storage in shared)


def managed_bytes(maps: Path = Path("/proc/self/maps")) -> int:
    """Bytes of managed memory that this process has, in use or kept by CUDA for later use.

    The driver maps it by its device file for unified memory, at an offset that is the address. The file of an ordinary
    context is mapped for semaphores alone, below the addresses that memory gets.
    """
    size = 0
    with maps.open() as lines:
        for line in lines:
            if not line.rstrip().endswith("/dev/nvidia-uvm"):
                continue
            span, _, offset = line.split()[:3]
            begin, end = (int(address, 16) for address in span.split("-"))
            if int(offset, 16) == begin and begin >= _FIRST_MANAGED:
                size += end - begin
    return size


def _is_cuda_handle(key: object) -> bool:
    """Tell torch's names of shared CUDA memory from those of shared host memory: numbers, or the name of a file."""
    handle = key[0] if isinstance(key, tuple) and key else key
    return isinstance(handle, bytes) and not handle.startswith(b"/torch_")
