"""libnccl by ctypes: the copy that this process has loaded already. Nothing is linked, and nothing is loaded."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from memsaver_core.contract.errors import MemsaverError

logger = logging.getLogger("memsaver")

#: The first version with ncclCommSuspend, ncclCommResume and ncclCommMemStats. torch suspends its communicators by
#: itself if it was built with this version or a later one.
SUSPENDS = (2, 29, 7)

#: NCCL_SUSPEND_MEM of nccl.h.
_SUSPEND_MEMORY = 1
#: ncclCommMemStat_t of nccl.h.
_SUSPENDABLE, _SUSPENDED, _PERSISTENT = 0, 1, 2


@dataclass(frozen=True)
class Held:
    """Device memory of one communicator, bytes. ``suspendable`` stays the same while it is suspended."""

    suspendable: int
    persistent: int
    suspended: bool


class Nccl:
    """A loaded libnccl. Each call of a function that fails raises MemsaverError with NCCL's description of it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        version = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        self.version = (version.value // 10000, version.value // 100 % 100, version.value % 100)
        self.version_text = ".".join(map(str, self.version))

    def held(self, comm: int) -> Held:
        """Count what a communicator holds. Needs NCCL 2.29.7, as do ``suspend`` and ``resume``."""
        values = {which: ctypes.c_uint64() for which in (_SUSPENDABLE, _SUSPENDED, _PERSISTENT)}
        for which, value in values.items():
            self._call("ncclCommMemStats", ctypes.c_void_p(comm), which, ctypes.byref(value))
        return Held(values[_SUSPENDABLE].value, values[_PERSISTENT].value, bool(values[_SUSPENDED].value))

    def suspend(self, comm: int) -> None:
        """Give back its memory; returns when every rank has called it. The device must be the calling thread's."""
        self._call("ncclCommSuspend", ctypes.c_void_p(comm), _SUSPEND_MEMORY)

    def resume(self, comm: int) -> None:
        """Take its memory again, at the same addresses; returns when every rank has called it."""
        self._call("ncclCommResume", ctypes.c_void_p(comm))

    def _call(self, name: str, *arguments: object) -> None:
        # By subscript: a separate function object, since another user of the library may have declared arguments.
        if result := self._library[name](*arguments):
            describe = self._library["ncclGetErrorString"]
            describe.restype = ctypes.c_char_p
            raise MemsaverError(f"{name} failed: {(describe(result) or b'unknown error').decode()}")


def loaded() -> Nccl | None:
    """Return torch's libnccl, else another that this process has loaded, or None."""
    for path in _candidates():
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        if hasattr(library, "ncclGetVersion"):
            return Nccl(library)
    return None


def _candidates() -> Iterator[str]:
    yield str(Path(torch.__file__).with_name("lib") / "libtorch_cuda.so")  # finds what it is linked with, too
    yield from loaded_paths()  # only then: to list what is mapped takes milliseconds


def loaded_paths() -> tuple[str, ...]:
    """Return the paths of the libnccl files that this process has mapped."""
    with open("/proc/self/maps") as lines:
        fields = (line.rstrip("\n").split(maxsplit=5) for line in lines if "/libnccl.so" in line)
        return tuple(dict.fromkeys(each[5] for each in fields))


def warn_of_registered_graphs() -> None:
    """Warn if NCCL registers the buffers of CUDA graphs, its default: a replay may hang after memory was remapped."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    if "nccl" in dist.get_backend_config() and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
        logger.warning(
            "NCCL is in use without NCCL_GRAPH_REGISTER=0: CUDA graphs with NCCL calls may hang on replay after a "
            "resume. Set NCCL_GRAPH_REGISTER=0 before the engine starts"
        )
