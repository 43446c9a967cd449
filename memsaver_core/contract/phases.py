"""The operations and their phases."""

from __future__ import annotations

from enum import Enum
from typing import Literal

#: The two operations on the memory of tags.
Verb = Literal["release", "resume"]
#: All operations.
OperationName = Literal["release", "resume", "resize"]


class Phase(str, Enum):
    """One measured step of an operation, in the order in which they run: those of a release, then those of a resume.
    Its ``value`` is the name in answers and metrics."""

    meaning: str
    waits: bool

    def __new__(cls, name: str, meaning: str = "", waits: bool = False) -> Phase:
        """``waits``: how long it takes depends on others (requests in flight, other processes, the caller)."""
        phase = str.__new__(cls, name)
        phase._value_ = name
        phase.meaning, phase.waits = meaning, waits
        return phase

    DRAIN = "drain", "requests in flight end, are aborted or frozen", True
    PREPARE = "prepare", "ranks check whether the operation is possible"
    CHECK = "check", "whether the release is possible; nothing is changed"
    SYNCHRONIZE = "synchronize", "the devices finish what was launched"
    PAUSE = "pause", "content is backed up and memory unmapped"
    TRIM_WORKSPACES = "trim_workspaces", "cuBLAS workspaces are freed"
    EMPTY_CACHE = "empty_cache", "torch.cuda.empty_cache()"
    TRIM_GRAPHS = "trim_graphs", "the driver's cache for graphs is freed"
    TRIM_PINNED = "trim_pinned", "torch's cache of pinned host memory is freed"
    IPC_COLLECT = "ipc_collect", "torch.cuda.ipc_collect()"
    SETTLE = "settle", "the devices' own counts fall"
    SUSPEND_COMMUNICATORS = "suspend_communicators", "NCCL gives its memory back, on all ranks together"
    LOCK = "lock", "device calls of all ranks block"
    HIBERNATE = "hibernate", "the CUDA context is given back"
    WAIT_FOR_WEIGHTS = "wait_for_weights", "a weight update ends", True
    RESERVE = "reserve", "device memory is taken for a resume that is prepared"
    PREPARED = "prepared", "the operation waits for its commit", True
    WAIT_FOR_MEMORY = "wait_for_memory", "other processes free device memory", True
    WAKE = "wake", "the CUDA context is restored"
    UNLOCK = "unlock", "device calls of all ranks continue"
    RESUME_COMMUNICATORS = "resume_communicators", "NCCL takes its memory again, on all ranks together"
    RESTORE = "restore", "memory is mapped and content copied back"
    RESIZE = "resize", "memory of the KV cache is unmapped or mapped"
    REPAIR = "repair", "the engine repairs what was resumed"
    VERIFY = "verify", "the tokens of the verification prompt are computed"
    REOPEN = "reopen", "admission opens"
