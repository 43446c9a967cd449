"""Device memory for a resume: reserved while it is prepared, or waited for while other processes hold it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from memsaver_core import PhaseLog
from memsaver_core.errors import OutOfDeviceMemoryError
from memsaver_core.options import ResumeOptions
from memsaver_server.cancellation import Cancellation
from memsaver_server.engine import Memory
from memsaver_server.operation import Operation

#: Interval at which a resume that waits for device memory reads how much is free, seconds.
MEMORY_POLL_S = 0.05


@contextmanager
def reserved(memory: Memory, options: ResumeOptions, operation: Operation, log: PhaseLog) -> Iterator[None]:
    """Hold the device memory of a resume that is to be prepared, until the block has used it or has ended.

    Raises:
        OutOfDeviceMemoryError: it is not free.
    """
    if not operation.request.prepare:
        yield
        return
    if operation.blocks_others:
        with log.phase("reserve"):
            memory.reserve(options)
    try:
        yield
    except BaseException:
        memory.give_back_reserved()
        raise


def wait_for_memory(memory: Memory, short: OutOfDeviceMemoryError, deadline: float, cancellation: Cancellation) -> None:
    """Poll until the device has the missing memory free, or the deadline. Other processes do not signal a release."""
    while time.monotonic() < deadline:
        time.sleep(max(0.0, min(MEMORY_POLL_S, deadline - time.monotonic())))
        cancellation.check()
        for device in memory.read_devices():
            if device.index == short.device and device.total_bytes - device.used_bytes >= short.needed_bytes:
                return
