"""Engines of one GPU that hand the memory of their KV caches to each other.

Every ``TICK_S`` each writes to a file in shared memory what its cache has and what it wants, under a lock that ends
with its process. It takes free memory if it lacks some, and gives memory back if another one lacks some. No process
directs the others. A row that is old is not counted: that engine ended, sleeps or hangs, and gives nothing.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from memsaver_core.contract.errors import MemsaverError
from memsaver_core.contract.requests import ResizeKvCache
from memsaver_core.contract.status import DeviceMemory, KvCacheAnswer
from memsaver_server.engine.kv_cache import ElasticCache, free_bytes
from memsaver_server.engine.lifecycle import Lifecycle
from memsaver_server.operation.operation import Operation
from memsaver_server.threads import start_thread

logger = logging.getLogger("memsaver")

#: How often an engine looks, and after how long a row is old, seconds.
TICK_S = 0.5
OLD_S = 10.0
#: How long a shrink waits for requests on pages that go, and how long none is tried after one that failed, seconds.
DRAIN_S = 10.0
#: The operations' client.
CLIENT = "memsaver-balance"
#: A cache of which so much is used lacks memory, and wants this many times what it has.
PRESSED, MORE = 0.9, 1.5
#: After a prefix was computed again, a cache counts as short of memory for the first time, and gives no memory that it
#: has to others for the second, seconds.
LACKS_S, KEEPS_S = 2.0, 30.0
#: Moves of less than this part of the largest cache are not worth it, and so much of the device stays free.
STEP = 1 / 64


@dataclass(frozen=True)
class Row:
    """What one engine's cache has, and what it wants, bytes."""

    at: float  # of the monotonic clock, which all processes of a host share
    bytes: int
    wanted: int


class Balancer:
    """Resizes a cache between two bounds, in a separate thread."""

    def __init__(self, cache: ElasticCache, lifecycle: Lifecycle, bounds: tuple[int, int], name: str) -> None:
        self._cache = cache
        self._lifecycle = lifecycle
        self._low, self._high = bounds
        self._name = name
        self._stopped = threading.Event()
        self._tried_at = 0.0
        self._recomputed, self._recomputed_at = 0, -KEEPS_S
        self._last: Operation | None = None

    def start(self) -> None:
        start_thread("memsaver-balance", self._run)

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            try:
                self._tick()
            except (MemsaverError, OSError) as error:  # the engine sleeps, is busy, or ends
                logger.debug("the KV cache is not balanced now: %s", error)

    def _tick(self) -> None:
        now = self._lifecycle.snapshot()
        if now.running is not None or now.state != "resident":
            return
        devices = self._lifecycle.memory.read_devices()
        cache = self._cache.read(devices)
        at = time.monotonic()
        if cache.recomputed > self._recomputed:
            self._recomputed, self._recomputed_at = cache.recomputed, at
        wanted = wanted_bytes(cache, self._low, self._high, at - self._recomputed_at)
        mine = Row(at, cache.bytes, wanted)
        with _rows(devices) as rows:
            others = [row for name, row in rows.items() if name != self._name]
            rows[self._name] = mine
        free = free_bytes(devices) - int(cache.full_bytes * STEP)
        target = target_bytes(mine, others, max(0, free))
        if abs(target - cache.bytes) < max(cache.page_bytes, cache.full_bytes * STEP):
            return
        if self._last is None or self._last.error is None or time.monotonic() - self._tried_at > DRAIN_S:
            self._last = self._cache.start(ResizeKvCache(bytes=target, timeout_s=DRAIN_S), key=None, client=CLIENT)
            self._tried_at = time.monotonic()


def wanted_bytes(cache: KvCacheAnswer, low: int, high: int, recomputed_s: float) -> int:
    """Return the size that a cache wants: half more than is in use, or half more than it has if that is full or too
    small for its prefixes, one of which was last computed again ``recomputed_s`` ago."""
    lacks = cache.used_bytes >= PRESSED * cache.bytes or recomputed_s < LACKS_S
    base = cache.bytes if lacks else cache.used_bytes
    wanted = max(int(base * MORE), cache.bytes if recomputed_s < KEEPS_S else 0)
    return max(low, min(wanted, high, cache.full_bytes))


def target_bytes(mine: Row, others: Sequence[Row], free: int) -> int:
    """Return the size that a cache should have, while ``free`` bytes of the device are unused. It gives others what
    they lack: what it does not want or, if that is more, what it has above an equal share, up to their shares."""
    share = (free + mine.bytes + sum(row.bytes for row in others)) // (1 + len(others))
    lacking = sum(max(0, row.wanted - row.bytes) for row in others) - free
    entitled = sum(max(0, min(row.wanted, share) - row.bytes) for row in others) - free
    gives = max(0, min(mine.bytes - mine.wanted, lacking), min(mine.bytes - share, entitled))
    return mine.bytes - gives if gives else mine.bytes + max(0, min(mine.wanted - mine.bytes, free))


@contextmanager
def _rows(devices: Sequence[DeviceMemory]) -> Iterator[dict[str, Row]]:
    """Yield the rows of the engines on these devices, to be changed; nobody else reads or writes them meanwhile."""
    digest = sha256(" ".join(sorted(device.uuid for device in devices)).encode()).hexdigest()[:16]
    path = Path(f"/dev/shm/memsaver-{os.getuid()}-balance-{digest}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            found = {name: Row(*row) for name, row in json.loads(file.read() or "{}").items()}
        except (ValueError, TypeError, AttributeError):  # a writer died
            found = {}
        oldest = time.monotonic() - OLD_S
        rows = {name: row for name, row in found.items() if row.at > oldest}
        yield rows
        file.seek(0)
        file.truncate()
        json.dump({name: (row.at, row.bytes, row.wanted) for name, row in rows.items()}, file)
