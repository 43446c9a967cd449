"""Engines of one GPU that hand the memory of their KV caches to each other.

Every ``TICK_S`` each writes to a file in shared memory what its cache has and what it wants, under a lock that ends
with its process. It takes free memory if it lacks some, and gives memory back if another one lacks some. No process
directs the others. A row that is old is not counted: that engine ended, sleeps or hangs, and gives nothing.

A release leaves the cache with its smallest size, so that the engine comes back with little; then it grows to what it
had, as far as there is memory. A resume that is short of memory all the same asks the others for it.

A release also empties torch's cache. As much as an engine ever used outside its regions stays free for its next steps.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

from pydantic import Field, TypeAdapter

from memsaver_core.contract.errors import MemsaverError
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import ResizeKvCache
from memsaver_core.contract.status import DeviceMemory, KvCacheAnswer, Status
from memsaver_server.engine.kv_cache import ElasticCache, free_bytes
from memsaver_server.engine.lifecycle import Lifecycle
from memsaver_server.operation.operation import BALANCER, Operation
from memsaver_server.threads import start_thread

logger = logging.getLogger("memsaver")

#: How often an engine looks, and after how long a row is old, seconds.
TICK_S = 0.5
OLD_S = 10.0
#: How long a shrink waits for requests on pages that go, and how long none is tried after one that failed, seconds.
DRAIN_S = 10.0
#: A cache of which at least this part is used lacks memory.
PRESSED = 0.9
#: It wants MORE times its size, but at least MORE_STEPS steps more; any other cache wants MORE times what requests use.
MORE, MORE_STEPS = 1.5, 4
#: For LACKS_S after a prefix was computed again a cache counts as short of memory, and for KEEPS_S it gives none of its
#: memory to others, seconds. For KEEPS_S after a release it wants the memory that it had before.
LACKS_S, KEEPS_S = 2.0, 30.0
#: An engine that was seen without requests for so long wants only the lower bound of its cache, seconds.
IDLE_S = 5.0
#: The least change of size, as a part of the full cache, but at least a page; this much of the device stays free.
STEP = 1 / 64

_Size = Annotated[int, Field(ge=0, lt=1 << 63)]


class CacheRow(NamedTuple):
    """What one engine's cache has, and what it wants, bytes."""

    at: float  # of the monotonic clock, which all processes of a host share
    bytes: _Size
    wanted: _Size
    resume: _Size = 0  # to be freed for a resume of the engine, which is short of memory and has no cache yet
    spare: _Size = 0  # to be left free: the engine may need it again outside its regions


_ROWS = TypeAdapter(dict[str, CacheRow])


class Balancer:
    """Resizes a cache between two bounds, in a separate thread."""

    def __init__(self, cache: ElasticCache, lifecycle: Lifecycle, name: str) -> None:
        self._cache = cache
        self._lifecycle = lifecycle
        self._name = name
        self._asked = 0  # bytes for a resume
        self._had = 0  # bytes before the last release
        self._had_until = -math.inf  # until when it wants them again; infinite while it is released
        self._stopped = threading.Event()
        self._tried_at = 0.0
        self._recomputed, self._recomputed_at = 0, -KEEPS_S
        self._used_at = time.monotonic()
        self._last: Operation | None = None
        self._outside = 0  # the most bytes that the engine had outside its regions

    def start(self) -> None:
        start_thread("memsaver-balance", self._run)

    def stop(self) -> None:
        self._stopped.set()

    def release(self, work: Callable[[], OperationReport]) -> OperationReport:
        """Release the cache with its content, by ``work``; return the report."""
        try:
            had = self._cache.read(()).bytes
        except MemsaverError:  # this engine's cache cannot be resized
            return work()
        self._had = had if time.monotonic() > self._had_until else max(had, self._had)
        self._had_until = math.inf
        report = self._cache.lowered(work)
        self._note()
        return report

    def ask(self, size: int) -> None:
        """Ask the other caches of these devices to free ``size`` bytes for a resume; 0 withdraws that."""
        if size or self._asked:
            self._asked = size
            self._note()

    def _note(self) -> None:
        """Remove the cache's row; write that of a resume if one is short of memory."""
        with suppress(MemsaverError, OSError), _rows(self._lifecycle.memory.read_devices()) as rows:
            rows.pop(self._name, None)
            if self._asked:
                rows[self._name] = CacheRow(time.monotonic(), 0, 0, self._asked)

    def _run(self) -> None:
        while not self._stopped.wait(TICK_S):
            try:
                self._tick()
            except (MemsaverError, OSError) as error:  # the engine sleeps, is busy, or ends
                logger.debug("the KV cache is not balanced now: %s", error)
        self._asked = 0
        self._note()  # without a row of this engine

    def _tick(self) -> None:
        now = self._lifecycle.snapshot()
        if now.state == "resuming" and self._asked:  # it waits
            self._note()
        if now.running is not None or now.state != "resident":
            self._used_at = time.monotonic()
            return
        before, devices = self._lifecycle.memory.status(), self._lifecycle.memory.read_devices()
        cache = self._cache.read(devices)
        at = time.monotonic()
        if cache.recomputed > self._recomputed:
            self._recomputed, self._recomputed_at, self._used_at = cache.recomputed, at, at
        if cache.used_bytes:
            self._used_at = at
        low, high = self._cache.bounds
        self._had_until = min(self._had_until, at + KEEPS_S)
        wanted = wanted_bytes(cache, low, high, at - self._recomputed_at, at - self._used_at)
        if at < self._had_until:
            wanted = max(wanted, min(self._had, high, cache.full_bytes))
        # An operation that began meanwhile may have changed the status or the devices.
        outside = min(outside_bytes(status, devices) for status in (before, self._lifecycle.memory.status()))
        if self._lifecycle.snapshot().running is not None:
            return
        self._outside = max(self._outside, outside)
        mine = CacheRow(at, cache.bytes, wanted, spare=self._outside - outside)
        with _rows(devices) as rows:
            others = [row for name, row in rows.items() if name != self._name]
            rows[self._name] = mine
        target = target_bytes(mine, others, free_bytes(devices), low, step_bytes(cache))
        if target == cache.bytes:
            return
        if self._last is None or self._last.error is None or time.monotonic() - self._tried_at > DRAIN_S:
            self._last = self._cache.start(ResizeKvCache(bytes=target, timeout_s=DRAIN_S), key=None, client=BALANCER)
            self._tried_at = time.monotonic()


def wanted_bytes(cache: KvCacheAnswer, low: int, high: int, recomputed_s: float, idle_s: float) -> int:
    """Return the size that a cache wants: half more than requests use and find again. If it is full, or too small for
    its prefixes, one of which was last computed again ``recomputed_s`` ago, it wants half more than it has, and at
    least ``MORE_STEPS`` more. It wants no more than ``low`` if no request has used it for ``idle_s`` > ``IDLE_S``."""
    if idle_s > IDLE_S:
        return low
    if cache.used_bytes >= PRESSED * cache.bytes or recomputed_s < LACKS_S:
        wanted = max(int(cache.bytes * MORE), cache.bytes + MORE_STEPS * step_bytes(cache))
    else:
        wanted = int(min(cache.bytes, cache.used_bytes + cache.reused_bytes) * MORE)
        wanted = max(wanted, cache.bytes if recomputed_s < KEEPS_S else 0)
    return max(low, min(wanted, high, cache.full_bytes))


def step_bytes(cache: KvCacheAnswer) -> int:
    """Return the least change of a cache's size."""
    return max(cache.page_bytes, int(cache.full_bytes * STEP))


def outside_bytes(status: Status, devices: Sequence[DeviceMemory]) -> int:
    """Return the memory that the engine's processes have outside their regions on the device where that is most; 0 if
    the driver does not count by process."""
    if status.driver == "host":  # a host device holds only regions
        return 0
    return max(
        (
            each.process_bytes - sum(tag.mapped_by_device.get(each.index, 0) for tag in status.tags)
            for each in devices
            if each.process_bytes is not None
        ),
        default=0,
    )


def target_bytes(mine: CacheRow, others: Sequence[CacheRow], free: int, low: int, step: int) -> int:
    """Return the size that a cache should have, while ``free`` bytes of the device are unused. ``step`` bytes of them
    stay free, and no change is smaller. It gives the largest of three amounts: what it does not want, up to what other
    caches lack; what it has beyond an equal share, up to what others lack of theirs; what resumes and spare memory
    lack, down to ``low``. If it gives nothing, it takes free memory up to what it wants."""
    left = max(0, free - step) - mine.spare - sum(row.resume + row.spare for row in others)
    free = max(0, left)
    caches = [row for row in others if not row.resume]
    share = (free + mine.bytes + sum(row.bytes for row in caches)) // (1 + len(caches))
    lacking = sum(max(0, row.wanted - row.bytes) for row in caches) - free
    entitled = sum(max(0, min(row.wanted, share) - row.bytes) for row in caches) - free
    due = min(mine.bytes - low, -left)
    gives = max(0, min(mine.bytes - mine.wanted, lacking), min(mine.bytes - share, entitled), due)
    change = -gives if gives else max(0, min(mine.wanted - mine.bytes, free))
    return mine.bytes + change if abs(change) >= step else mine.bytes


@contextmanager
def _rows(devices: Sequence[DeviceMemory]) -> Iterator[dict[str, CacheRow]]:
    """Yield the rows of the engines on these devices, to be changed; no other process uses them meanwhile."""
    digest = sha256(" ".join(sorted(device.uuid for device in devices)).encode()).hexdigest()[:16]
    path = Path(f"/dev/shm/memsaver-{os.getuid()}-balance-{digest}")
    with _locked(path) as file:
        try:
            found = _ROWS.validate_json(file.read() or b"{}")
        except ValueError as error:  # a writer died, or is none of ours; engines write their rows again soon
            logger.warning("%s has other content than rows of engines, which is dropped: %s", path, error)
            found = {}
        now = time.monotonic()
        rows = {name: row for name, row in found.items() if now - OLD_S < row.at <= now}
        yield rows
        file.seek(0)
        file.truncate()
        file.write(json.dumps(rows).encode())
        if not rows:
            path.unlink(missing_ok=True)


def _locked(path: Path) -> BinaryIO:
    """Open and lock a file that any holder of its lock may remove."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        file = os.fdopen(descriptor, "r+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return file
        file.close()  # it was removed before the lock was taken
