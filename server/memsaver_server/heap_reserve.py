"""Reserves heap for the threads that answer requests.

While the CUDA driver checkpoints a process it pins about 700 MiB of host memory and holds the lock on the process's
address space for 0.2 s (measured on an H200, driver 580). A thread whose heap grows in that time blocks in the kernel;
a Python thread then blocks every thread that needs the interpreter's lock, and no probe is answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: Free heap for each thread, bytes. An answer takes some ten thousand.
RESERVE_BYTES = 4 << 20

# Below malloc's threshold for mapping a block by itself, and unmapping it when freed (128 KiB).
_BLOCK_BYTES = 64 << 10


@contextmanager
def reserved_heap() -> Iterator[None]:
    """Keep ``RESERVE_BYTES`` free in the calling thread's heap while the block runs, if there is that much memory."""
    blocks: list[bytearray] = []
    with suppress(MemoryError):  # the thread matters more than its reserve
        while len(blocks) < RESERVE_BYTES // _BLOCK_BYTES:
            blocks.append(bytearray(_BLOCK_BYTES))
    end = bytearray(1 << 10)  # malloc returns free memory at the end of a heap to the kernel
    del blocks
    yield
    del end
