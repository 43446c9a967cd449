"""Whether the engine takes requests, and what has to be repaired before it may."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from memsaver_core.contract.errors import PauseEndedError
from memsaver_core.contract.status import Status, discarded
from memsaver_server.engine import DataParallelEngine, Engine, Memory
from memsaver_server.engine.tag_selection import asleep_dp_ranks, released_tags
from memsaver_server.settings import Settings

logger = logging.getLogger("memsaver")


class Admission:
    """Opens admission while all memory is resident, repaired and written, and no operation or pause closes it. Every
    method may be called from any thread. The engine is called under the lock, so its last call is the last decision."""

    def __init__(self, engine: Engine, memory: Memory, settings: Settings) -> None:
        self._engine = engine
        self._memory = memory
        self._settings = settings
        self._lock = threading.RLock()
        self._operation = ""
        self._leaving: frozenset[int] = frozenset()
        self._paused: Literal["", "paused", "asleep"] = ""
        self._pausing: set[object] = set()  # pauses that still drain the engine
        self._lost: set[str] = set()
        self._to_repair: set[str] = set()
        self._unverified = ""
        self._unwritten: set[str] = set()

    @property
    def asleep(self) -> bool:
        """Whether generation was put to sleep without a release."""
        return self._paused == "asleep"

    def closed_reason(self, status: Status) -> str:
        """Return why the engine accepts no requests, or an empty string if it does."""
        with self._lock:
            if status.state == "failed":
                return failed_for_good(status)
            in_part = self.serves_in_part(status)
            if self._operation and not (self._leaving and in_part):
                return self._operation
            if status.hibernated:
                return "the process is hibernated"
            if not in_part and (released := released_tags(status)):
                return f"memory of {', '.join(sorted(released))} is released"
            if self._to_repair:
                return f"{', '.join(sorted(self._to_repair))} came back but could not be repaired; resume again"
            if unwritten := self.unwritten(status):
                return discarded(unwritten)
            return self._unverified or ("generation is paused" if self._paused or self._pausing else "")

    def needs_repair(self) -> bool:
        return bool(self._to_repair)

    def serves_in_part(self, status: Status) -> bool:
        """Whether some data-parallel engines serve while others are released, or about to be."""
        asleep = asleep_dp_ranks(status) | self._leaving
        return bool(asleep) and any(rank.dp_rank not in asleep for rank in status.ranks)

    def close_for(self, reason: str, dp_ranks: Iterable[int]) -> None:
        """Close admission for an operation, until ``reopen``: of the engines ``dp_ranks``; of all, if none is named."""
        with self._lock:
            self._operation, self._leaving = reason, frozenset(dp_ranks)
            self._update()

    def reopen(self) -> None:
        """The operation has ended: open admission if nothing else closes it."""
        with self._lock:
            self._operation, self._leaving = "", frozenset()
            self._update()

    @contextmanager
    def pausing(self, *, asleep: bool) -> Iterator[None]:
        """Pause generation until ``unpause``; the block drains the engine. If it raises, the pause is undone. Raises
        PauseEndedError if ``unpause`` was called meanwhile."""
        own = object()
        with self._lock:
            self._pausing.add(own)
            self._update()
        try:
            yield
        except BaseException:
            with self._lock:
                self._pausing.discard(own)
                self._update()
            raise
        with self._lock:
            if own not in self._pausing:
                self._update()  # the engine, which stands still now, goes on
                happened = "generation was continued while this pause waited for requests in flight"
                raise PauseEndedError(f"{happened}; pause again")
            self._pausing.remove(own)
            self._paused = "asleep" if asleep else self._paused or "paused"

    def unpause(self) -> str:
        """End a pause. Returns why admission is still closed, or an empty string."""
        with self._lock:
            self._paused = ""
            self._pausing.clear()
            return self._update()

    def unverified(self, why: str) -> None:
        """Note why the engine may compute wrong tokens; an empty string: it computes the right ones."""
        with self._lock:
            self._unverified = why
            self._update()

    def content_lost(self, tags: Iterable[str], unwritten: Iterable[str]) -> None:
        """Note that a release has discarded the content of ``tags``; that of ``unwritten`` has to be written again."""
        with self._lock:
            self._lost.update(tags)
            self._unwritten.update(unwritten)

    def unwritten(self, status: Status) -> frozenset[str]:
        """Return the tags whose content is lost until it is written again."""
        with self._lock:
            return frozenset(self._unwritten & {tag.tag for tag in status.tags if tag.bytes})

    def written(self, tags: Iterable[str]) -> str:
        """Note that the content of ``tags`` was written. Returns why admission is still closed, or an empty string."""
        with self._lock:
            self._unwritten.difference_update(tags)
            return self._update()

    def resumed(self, tags: Iterable[str]) -> None:
        """Note that ``tags`` are resident again, and not repaired yet."""
        with self._lock:
            self._to_repair.update(tags)

    def repair(self) -> None:
        """Have the engine repair what was resumed. If that fails, the next call tries again."""
        with self._lock:
            tags, lost = sorted(self._to_repair), sorted(self._to_repair & self._lost)
        rebuilt = self._engine.repair(tags, lost) if tags else None
        with self._lock:
            self._to_repair.difference_update(tags)
            self._lost.difference_update(set(lost) - released_tags(self._memory.status()))  # other dp ranks' stay
            self._unwritten.difference_update(rebuilt or ())
            if unwritten := self._unwritten.intersection(lost):
                logger.warning(discarded(unwritten))

    def _update(self) -> str:
        status = self._memory.status()
        reason = self.closed_reason(status)
        if isinstance(self._engine, DataParallelEngine):
            self._engine.exclude(asleep_dp_ranks(status) | self._leaving)
        if reason:
            self._engine.close_admission(reason, hold=self._hold())
        else:
            self._engine.open_admission()
        return reason

    def _hold(self) -> int:
        """Return how many new requests may wait: some while only a pause closes admission, or the operator says so."""
        status = self._memory.status()
        closed_otherwise = self._operation or released_tags(status) or self.unwritten(status)
        paused_only = (self._paused or self._pausing) and not closed_otherwise
        return self._settings.queue_limit if paused_only or self._settings.while_released == "queue" else 0


def failed_for_good(status: Status) -> str:
    """Return why an engine with this status refuses everything, and what to do."""
    advice = "" if status.failure.endswith(("restart the engine", "restart it")) else "; restart the engine"
    return f"the engine has failed for good: {status.failure}{advice}"
