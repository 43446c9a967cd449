"""The KV cache of an engine, made smaller and larger while it serves.

Shrink: no page that goes is handed out -> requests on such pages end or are preempted -> their memory goes.
Grow: the memory comes, once there is enough -> the pages are handed out.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from functools import partial

from memsaver_core.contract import errors
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.reports import DeviceRoom, OperationReport, PlanAnswer, PlannedTag, ResizedReport, TagReport
from memsaver_core.contract.requests import ResizeKvCache
from memsaver_core.contract.status import DeviceMemory, KvCacheAnswer, TagStatus
from memsaver_core.phases import PhaseLog
from memsaver_server.engine import CachePages, ResizableEngine
from memsaver_server.engine.lifecycle import Lifecycle
from memsaver_server.engine.plan import general_blockers, plan_answer, readable
from memsaver_server.operation.operation import BALANCER, Operation
from memsaver_server.threads import in_thread

_TAGS = ResizeKvCache.tags
#: How long a status call waits for what the engine says of its cache, seconds.
GLANCE_S = 0.1


class ElasticCache:
    """Resizes the KV cache of ``engine`` by operations of ``lifecycle``. Methods may be called from any thread."""

    def __init__(self, engine: ResizableEngine, lifecycle: Lifecycle, bounds: tuple[int, int] | None = None) -> None:
        """``bounds``: a ``Balancer`` resizes it between these."""
        self._engine = engine
        self._lifecycle = lifecycle
        self._bounds = bounds
        self._limit: int | None = None  # that a caller's last resize set, bytes
        self._last: CachePages | None = None
        self._asking: asyncio.Task[None] | None = None

    def read(self, devices: Iterable[DeviceMemory]) -> KvCacheAnswer:
        """Return the size of the cache, and the sizes that it can have with what is free on its ``devices``. Waits for
        the engine, which may raise MemsaverError."""
        return self._answer(self._engine.kv_cache(), devices)

    def latest(self, devices: Iterable[DeviceMemory]) -> KvCacheAnswer | None:
        """As ``read``, from what the engine said last; None if it has said nothing, or cannot resize its cache."""
        return None if self._last is None else self._answer(self._last, devices)

    def ask(self) -> asyncio.Task[None]:
        """Return the task that asks the engine for ``latest``. Use it in one event loop."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    async def _ask(self) -> None:
        try:
            self._last = await in_thread(self._engine.kv_cache)
        except Exception:  # a read reports it
            self._last = None

    def start(self, request: ResizeKvCache, *, key: str | None, client: str) -> Operation:
        """Begin a resize, or join the equal one in flight; returns at once. After a failure all is as before.

        Raises:
            BadRequestError: the cache cannot have this size. Nothing was started.
            ConflictError, IdempotencyKeyError, NoThreadError, TooManyOperationsError: see OperationQueue.submit.
        """
        pages = _pages(request, self._engine.kv_cache())
        work = partial(self._resize, request, pages)
        return self._lifecycle.operations.submit(request, work, key=key, client=client)

    def plan(self, request: ResizeKvCache, devices: Iterable[DeviceMemory]) -> PlanAnswer:
        """Return what the resize would do, with the present readings of ``devices``; raise BadRequestError."""
        cache = self._engine.kv_cache()
        pages = _pages(request, cache)
        now = self._lifecycle.snapshot()
        blockers = list(general_blockers(now.status, request, now.running))
        try:
            self._lifecycle.check_resident(_TAGS)
        except errors.NotResidentError as released:
            blockers.append(str(released))
        more = (pages - cache.kept) * cache.page_bytes
        rooms = [
            DeviceRoom(index=each.index, needed_bytes=max(0, more), free_bytes=each.unused_bytes) for each in devices
        ]
        verb = "release" if more < 0 else "resume"
        does = f"{verb} {readable(abs(more))} of kv_cache"
        if pages < cache.needed:
            does += f", after requests on {readable((cache.needed - pages) * cache.page_bytes)} of it"
        tag = self._tag()
        planned = PlannedTag(tag=tag.tag, restore=tag.restore, bytes=abs(more))
        return plan_answer("resize", [planned], blockers, rooms, does=does)

    def fit(self, resume: Callable[[], OperationReport]) -> OperationReport:
        """Call ``resume``, which brings back the released cache, with as many pages as find room; return its report.
        Raises OutOfDeviceMemoryError if these are too few: the cache then keeps its size, and stays released."""
        before = self._engine.kv_cache()
        pages, fewer, lowest = before.kept, 1, max(1, before.needed)
        while True:
            try:
                return resume()
            except errors.OutOfDeviceMemoryError as short:
                missing = short.needed_bytes - short.free_bytes
                smaller = max(lowest, pages - max(fewer, math.ceil(missing / before.page_bytes)))
                fewer *= 2  # memory comes in pieces: fewer pages may need as much
                if smaller >= pages or not self._back(smaller):
                    self._back(before.kept)
                    raise
                pages = smaller

    @property
    def bounds(self) -> tuple[int, int]:
        """The bounds between which it is balanced, as far as the last resize of a caller permits, bytes."""
        low, high = self._bounds or (0, 0)
        limit = high if self._limit is None else min(high, self._limit)
        return min(low, limit), limit

    def lowered(self, release: Callable[[], OperationReport]) -> OperationReport:
        """Make the cache as small as its bounds and requests permit, so that its resume finds room; then release it by
        ``release``. The report counts what both have released."""
        before = self._engine.kv_cache()
        pages = max(1, before.needed, math.ceil(self.bounds[0] / before.page_bytes))
        shrunk = self._tag().shrunk_bytes
        if pages < before.kept:
            self._back(pages)
        more = self._tag().shrunk_bytes - shrunk
        report = release()
        tags = [
            tag.model_copy(update={"released_bytes": tag.released_bytes + more}) if tag.tag in _TAGS else tag
            for tag in report.tags
        ]
        return report.model_copy(update={"tags": tuple(tags), "released_bytes": report.released_bytes + more})

    def _back(self, pages: int) -> bool:
        """Back only ``pages`` pages with memory; return whether that succeeded. No request uses any other."""
        try:
            self._engine.limit_kv_cache(pages, 0.0)
            self._engine.resize_kv_cache(pages)
        except errors.MemsaverError:
            return False
        return True

    def _resize(self, request: ResizeKvCache, pages: int, operation: Operation, log: PhaseLog) -> ResizedReport:
        self._lifecycle.check_resident(_TAGS)
        now = self._engine.kv_cache()
        before = now.kept
        if pages < before:
            with log.phase(Phase.DRAIN):
                self._drain(request, pages, operation)
        limits = self._bounds is not None and operation.client != BALANCER
        if limits:
            self._limit = pages * now.page_bytes if pages < now.total else None
        try:
            move = partial(self._move, operation, log)
            try:
                report, now = self._lifecycle.with_room(operation, log, request.wait_for_memory_s, partial(move, pages))
            except errors.OutOfDeviceMemoryError:
                if not limits:
                    raise
                operation.move_later()  # the cache keeps its size, and may grow to the new limit by need
                report, now = self._lifecycle.with_room(operation, log, 0.0, partial(move, before))
        except BaseException:
            operation.begin_undo()
            self._engine.limit_kv_cache(before, 0.0)
            raise
        return ResizedReport(**dict(report), kv_cache=self._answer(now, self._lifecycle.memory.read_devices()))

    def _drain(self, request: ResizeKvCache, pages: int, operation: Operation) -> None:
        try:
            self._engine.limit_kv_cache(
                pages, request.timeout_s or 0.0, request.mode, lambda: operation.cancelled_by is not None
            )
        except errors.DrainTimeoutError:
            operation.check()
            raise

    def _move(self, operation: Operation, log: PhaseLog, pages: int) -> tuple[OperationReport, CachePages]:
        self._lifecycle.check_resident(_TAGS)
        operation.await_commit()
        shrunk = self._tag().shrunk_bytes
        with log.phase(Phase.RESIZE):
            now = self._engine.resize_kv_cache(pages)
        tag = self._tag()
        more = tag.shrunk_bytes - shrunk
        report = TagReport(
            tag=tag.tag,
            restore=tag.restore,
            state=tag.state,
            bytes=tag.bytes,
            released_bytes=max(0, more),
            resumed_bytes=max(0, -more),
            already=not more,
        )
        return operation.moved(log.report("resize", (report,))), now

    def _tag(self) -> TagStatus:
        return next(tag for tag in self._lifecycle.memory.status().tags if tag.tag in _TAGS)

    def _answer(self, pages: CachePages, devices: Iterable[DeviceMemory]) -> KvCacheAnswer:
        sizes = {
            "bytes": pages.kept,
            "used_bytes": pages.used,
            "reused_bytes": pages.reused,
            "smallest_bytes": max(1, pages.needed),
            "largest_bytes": min(pages.total, pages.kept + free_bytes(devices) // pages.page_bytes),
            "full_bytes": pages.total,
        }
        return KvCacheAnswer(
            **{name: count * pages.page_bytes for name, count in sizes.items()},
            limit_bytes=self._limit,
            tokens=pages.kept * pages.page_tokens,
            page_bytes=pages.page_bytes,
            page_tokens=pages.page_tokens,
            recomputed=pages.recomputed,
        )


def free_bytes(devices: Iterable[DeviceMemory]) -> int:
    """Return what is free on the device that has least."""
    return min((each.unused_bytes for each in devices), default=0)


def _pages(asked: ResizeKvCache, now: CachePages) -> int:
    full = f"{readable(now.total * now.page_bytes)} or {now.total * now.page_tokens} tokens"
    if asked.fraction is not None:
        pages = max(1, int(asked.fraction * now.total))
    elif asked.bytes is not None:
        pages = asked.bytes // now.page_bytes
    else:
        pages = math.ceil((asked.tokens or 0) / now.page_tokens)
    if not 1 <= pages <= now.total:
        raise errors.BadRequestError(
            f"a KV cache of {pages} pages is impossible: a page takes {readable(now.page_bytes)}, and the largest "
            f"cache, with which the engine began, has {full}; the KV cache was not resized"
        )
    return pages
