"""Heap for the threads that answer, there before they need it.

While the CUDA driver checkpoints a process it pins some 700 MiB of host memory, and holds the lock on the process's
address space for 0.2 s (seen on an H200, driver 580). A thread whose heap must grow in that time waits for the lock in
the kernel, and where it is a Python thread, everybody who needs the interpreter waits with it: no probe is answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

#: Free heap for each thread, bytes. An answer takes a few tens of thousands.
HEADROOM_BYTES = 4 << 20

# Below what malloc would map by itself and give back at once (128 KiB).
_BLOCK_BYTES = 64 << 10


@contextmanager
def headroom() -> Iterator[None]:
    """Have the calling thread's heap hold ``HEADROOM_BYTES`` free bytes for as long as the block runs."""
    blocks = [bytearray(_BLOCK_BYTES) for _ in range(HEADROOM_BYTES // _BLOCK_BYTES)]
    end = bytearray(1 << 10)  # malloc gives back what is free at the end of a heap, so the end is not
    del blocks
    yield
    del end
