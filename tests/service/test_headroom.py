"""Threads that answer probes need no memory from the kernel while it may keep them waiting."""

from __future__ import annotations

import json

from tests.programs import output_of

# A process of its own, because the limit on its memory applies to all of its threads.
PROGRAM = """
import json, resource, threading
from contextlib import nullcontext
from memsaver_server.threads import RESERVE_BYTES, reserved_heap

BLOCK = 10_000

def data_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))

def answer(name, room):
    held = [None] * (8 * RESERVE_BYTES // BLOCK)
    with room:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes(), hard))  # from here on the process gets no more memory
        try:
            for at in range(len(held)):
                held[at] = bytearray(BLOCK)
        except MemoryError:
            pass
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    got[name] = at * BLOCK

_, hard = resource.getrlimit(resource.RLIMIT_DATA)
got = {"needed": RESERVE_BYTES // 2}
for name, room in (("without", nullcontext()), ("with", reserved_heap())):
    thread = threading.Thread(target=answer, args=(name, room))
    thread.start()
    thread.join()
print(json.dumps(got))
"""


def test_a_heap_with_headroom_need_not_grow() -> None:
    """Bytes that a thread can allocate while its process gets no more memory."""
    got = json.loads(output_of(PROGRAM))
    assert got["with"] >= got["without"] + got["needed"], got
