"""What a check of ``memsaver doctor`` looks at and finds."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """The result of a check. Only ``BLOCKED`` prevents memsaver from working."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. ``remedy`` says what to do, if anything."""

    subject: str
    level: Level
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Machine:
    """The CUDA driver as all checks see it: its library if there is one, why it does not work, its devices."""

    cuda: ctypes.CDLL | None
    cuda_error: str
    device_count: int

    @property
    def has_gpu(self) -> bool:
        return self.device_count > 0


def look() -> Machine:
    """Load the CUDA driver, without creating a context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return Machine(None, str(error), 0)
    code = cuda.cuInit(0)
    if code != 0:
        return Machine(cuda, f"cuInit failed with error {code}", 0)
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return Machine(cuda, "", count.value)
