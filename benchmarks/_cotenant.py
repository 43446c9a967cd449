"""The co-tenant of `soak.py`: takes and gives memory of the engine's device until SIGTERM, then prints how often.

    python _cotenant.py host DEVICE CAPACITY       # memory of a host device, by a separate saver
    python _cotenant.py cuda                       # plain device memory, as any other CUDA program takes it

On a GPU it writes into what it takes and looks, before it lets go, whether that is still there.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

MIB = 1 << 20
GIB = 1 << 30

#: What it leaves to others on a GPU, bytes: an engine that is resident computes with torch's own pool, too.
LEFT = 2 * GIB


class Ended(BaseException):
    """SIGTERM came."""


def end(*_: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Ended


def host(device: str, capacity: str) -> Callable[[], str]:
    from memsaver_core import _native

    saver = _native.Saver(driver="host", host_devices=[device], host_capacity=int(capacity))

    def turn() -> str:
        address = saver.allocate(0, "t", "discard", random.randrange(1, 64) * MIB)
        time.sleep(random.random() / 20)
        saver.free(address)
        time.sleep(random.random() / 20)
        return "taken"

    return turn


def cuda() -> Callable[[], str]:
    import torch

    device = torch.device("cuda")
    torch.zeros(1, device=device)

    def turn() -> str:
        room = torch.cuda.mem_get_info()[0] - LEFT
        everything = random.random() < 0.15
        size = room if everything else min(room, random.randrange(1, 16) * GIB)
        try:
            held = torch.empty(max(size, 2 * MIB), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return "came too late"  # the engine took it first
        ends = (held[:MIB], held[-MIB:])
        for part in ends:
            part.fill_(165)
        time.sleep(random.random() / 5)
        assert all(bool((part == 165).all()) for part in ends), "somebody wrote into the co-tenant's memory"
        del held, ends, part
        torch.cuda.empty_cache()
        time.sleep(random.random() / 5)
        return "took all" if everything else "took some"

    return turn


def main() -> None:
    signal.signal(signal.SIGTERM, end)
    counts: dict[str, int] = {}
    try:
        take_turn = {"host": host, "cuda": cuda}[sys.argv[1]](*sys.argv[2:])
        while True:
            what = take_turn()
            counts[what] = counts.get(what, 0) + 1
    except Ended:
        print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
