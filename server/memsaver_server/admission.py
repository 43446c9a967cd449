"""Whether the engine takes requests, and what has to be repaired before it may."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from memsaver_core.reports import Status
from memsaver_server.engine import Engine, Memory
from memsaver_server.settings import Settings
from memsaver_server.tag_selection import released_tags


class Admission:
    """Opens admission while all memory is resident and repaired and no operation or pause closes it.

    Every method may be called from any thread. The engine is called under the lock, so that its last call is the latest
    decision.
    """

    def __init__(self, engine: Engine, memory: Memory, settings: Settings) -> None:
        self._engine = engine
        self._memory = memory
        self._settings = settings
        self._lock = threading.Lock()
        self._operation = ""
        self._paused: Literal["", "paused", "asleep"] = ""
        self._lost: set[str] = set()
        self._to_repair: set[str] = set()

    @property
    def asleep(self) -> bool:
        """Whether generation was put to sleep without a release."""
        return self._paused == "asleep"

    def closed_reason(self, status: Status) -> str:
        """Return why the engine accepts no requests, or an empty string if it does."""
        with self._lock:
            return self._closed_reason(status)

    def needs_repair(self) -> bool:
        return bool(self._to_repair)

    def close_for(self, reason: str) -> None:
        """Close admission for an operation, until ``reopen``."""
        with self._lock:
            self._operation = reason
            self._engine.close_admission(reason, hold=self._hold())

    def reopen(self) -> None:
        """The operation has ended: open admission if nothing else closes it."""
        with self._lock:
            self._operation = ""
            self._update()

    @contextmanager
    def pausing(self, *, asleep: bool) -> Iterator[None]:
        """Pause generation until ``unpause``; undone if the block raises."""
        with self._lock:
            before = self._paused
            self._paused = "asleep" if asleep else before or "paused"
            self._update()
        try:
            yield
        except BaseException:
            with self._lock:
                self._paused = before
                self._update()
            raise

    def unpause(self) -> str:
        """End a pause. Returns why admission is still closed, or an empty string."""
        with self._lock:
            self._paused = ""
            return self._update()

    def content_lost(self, tags: Iterable[str]) -> None:
        """Note that a release has discarded the content of ``tags``."""
        with self._lock:
            self._lost.update(tags)

    def resumed(self, tags: Iterable[str]) -> None:
        """Note that ``tags`` are resident again, and not repaired yet."""
        with self._lock:
            self._to_repair.update(tags)

    def repair(self) -> None:
        """Have the engine repair what was resumed; what fails stays to be repaired."""
        with self._lock:
            tags, lost = sorted(self._to_repair), sorted(self._to_repair & self._lost)
        if tags:
            self._engine.repair(tags, lost)
        with self._lock:
            self._to_repair.difference_update(tags)
            self._lost.difference_update(lost)

    def _update(self) -> str:
        reason = self._closed_reason(self._memory.status())
        if reason:
            self._engine.close_admission(reason, hold=self._hold())
        else:
            self._engine.open_admission()
        return reason

    def _closed_reason(self, status: Status) -> str:
        if status.state == "failed":
            return f"the engine has failed for good: {status.failure}"
        if self._operation:
            return self._operation
        if status.hibernated:
            return "the process is hibernated"
        released = released_tags(status)
        if released:
            return f"memory of {', '.join(sorted(released))} is released"
        if self._to_repair:
            return f"{', '.join(sorted(self._to_repair))} came back but could not be repaired; resume again"
        return "generation is paused" if self._paused else ""

    def _hold(self) -> int:
        """How many new requests may wait: those of a paused engine, and during a release if the operator set so."""
        paused_only = self._paused and not self._operation and not released_tags(self._memory.status())
        return self._settings.queue_limit if paused_only or self._settings.while_released == "queue" else 0
