"""Threads that answer need nothing of the kernel while it may keep them waiting."""

from __future__ import annotations

import json

from tests.programs import output_of

# A process of its own: threads of other tests would change what is mapped.
PROGRAM = """
import json, threading
from contextlib import nullcontext
from memsaver_server.heap_reserve import RESERVE_BYTES, reserved_heap

def mapped():
    with open("/proc/self/maps") as maps:
        return [line for line in maps if " rw" in line]

def answer(name, room):
    with room:
        before = mapped()
        held = [bytearray(10_000) for _ in range(RESERVE_BYTES // 20_000)]
        changed[name] = mapped() != before
        del held

changed = {}
for name, room in (("without", nullcontext()), ("with", reserved_heap())):
    thread = threading.Thread(target=answer, args=(name, room))
    thread.start()
    thread.join()
print(json.dumps(changed))
"""


def test_a_heap_with_headroom_need_not_grow() -> None:
    assert json.loads(output_of(PROGRAM)) == {"without": True, "with": False}
