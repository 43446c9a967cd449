"""An operation: one release or resume, from the request to its report."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from memsaver_core import PhaseLog
from memsaver_core.options import ReleaseOptions, ResumeOptions
from memsaver_core.reports import OperationReport, PhaseReport
from memsaver_server.cancellation import Cancellation, OperationCancelledError
from memsaver_server.engine import LOCAL_MEMORY, DrainMode, Memory
from memsaver_server.lease import DEFAULT_LEASE_S, Lease

logger = logging.getLogger("memsaver")


@dataclass(frozen=True)
class ReleaseRequest:
    """What a caller asks of a release. Equal requests in flight are one operation.

    Attributes:
        options: what the core releases, and how.
        timeout_s: deadline of the drain, seconds.
        mode: what the drain does to requests in flight.
        at_least_bytes: release only as many of the tags as free this much, cheapest first; None releases all.
        verify: note the tokens of the verification prompt, for a resume to compare.
        prepare: stop before memory is moved, until a commit or the end of the lease.
        lease_s: how long it stays prepared, seconds. Requests that differ in it alone are equal.
    """

    options: ReleaseOptions = field(default_factory=ReleaseOptions)
    timeout_s: float = 25.0
    mode: DrainMode = "wait"
    at_least_bytes: int | None = None
    verify: bool = False
    prepare: bool = False
    lease_s: float = field(default=DEFAULT_LEASE_S, compare=False)
    operation: Literal["release"] = "release"

    @property
    def tags(self) -> tuple[str, ...]:
        return self.options.tags

    def patience_s(self, phase: str) -> float:
        """How long ``phase`` may wait beyond the phase timeout because the caller asked for it, seconds."""
        return self.timeout_s if phase == "drain" else 0.0


@dataclass(frozen=True)
class ResumeRequest:
    """What a caller asks of a resume; ``wait_for_memory_s`` limits the wait for other processes to free memory, and
    ``verify`` has it fail if the verification prompt gives other tokens than before the release. ``prepare`` and
    ``lease_s`` as of ``ReleaseRequest``."""

    options: ResumeOptions = field(default_factory=ResumeOptions)
    wait_for_memory_s: float = 0.0
    verify: bool = False
    prepare: bool = False
    lease_s: float = field(default=DEFAULT_LEASE_S, compare=False)
    operation: Literal["resume"] = "resume"

    @property
    def tags(self) -> tuple[str, ...]:
        return self.options.tags

    def patience_s(self, phase: str) -> float:
        """As ``ReleaseRequest.patience_s``."""
        return self.wait_for_memory_s if phase == "wait_for_memory" else 0.0


OperationRequest = ReleaseRequest | ResumeRequest
OperationStatus = Literal["queued", "running", "prepared", "succeeded", "failed", "cancelled"]

#: Drain modes, the weakest first.
_STRENGTH: tuple[DrainMode, ...] = ("wait", "keep", "abort")


@dataclass(frozen=True)
class Stall:
    """A phase without progress for longer than allowed."""

    phase: str
    seconds: float


def _overtaken(release: OperationRequest, by: OperationRequest) -> OperationRequest:
    """Return ``release`` with the drain mode of ``by`` and the longer deadline of both, if that is of the same tags and
    its mode is stronger."""
    if not isinstance(release, ReleaseRequest) or not isinstance(by, ReleaseRequest) or release.tags != by.tags:
        return release
    if _STRENGTH.index(by.mode) <= _STRENGTH.index(release.mode):
        return release
    return replace(release, mode=by.mode, timeout_s=max(release.timeout_s, by.timeout_s))


def _differ_only_in_drain(one: OperationRequest, other: OperationRequest) -> bool:
    if not isinstance(one, ReleaseRequest) or not isinstance(other, ReleaseRequest):
        return False
    return one == replace(other, mode=one.mode, timeout_s=one.timeout_s)


def tag_list(tags: Sequence[str]) -> str:
    """Return ``tags`` as messages name them; none means all."""
    return ", ".join(tags) or "all tags"


@dataclass
class Operation:
    """One release or resume. Only the queue and its worker thread write the fields.

    Attributes:
        request: what its callers ask for together.
        client: its first caller.
        callers: how many calls it answers.
        phase_timeout_s: seconds without progress after which a phase counts as stalled.
        failed_phase: the phase in which it failed, or an empty string.
        state: the state of the memory when it ended.
        keys: the Idempotency-Keys of its callers.
        lease: how long it stays prepared, if it is prepared first.
    """

    id: str
    request: OperationRequest
    client: str
    created_at: float
    memory: Memory = LOCAL_MEMORY
    phase_timeout_s: float = math.inf
    status: OperationStatus = "queued"
    callers: int = 1
    started_at: float | None = None
    finished_at: float | None = None
    seconds: float = 0.0
    log: PhaseLog | None = None
    report: OperationReport | None = None
    error: BaseException | None = None
    failed_phase: str = ""
    state: str = ""
    keys: list[str] = field(default_factory=list)
    done: Future[None] = field(default_factory=Future)
    _started: float = 0.0
    _progressed: float = field(default_factory=time.monotonic)
    _progress: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        # A waiter that is cancelled because its client went away must not cancel the wait of the others.
        self.done.set_running_or_notify_cancel()
        name = f"{self.request.operation} {self.id} of {tag_list(self.request.tags)}"
        self.lease = Lease(name, self.request.lease_s) if self.request.prepare else None
        self.cancellation = self.lease or Cancellation(name)
        self._lock = threading.Lock()
        self._answered = [self.request]
        self._has_failed = False

    def join(self, request: OperationRequest) -> bool:
        """Answer another call by this operation if its result is what ``request`` asks for; return whether it is.

        A release that differs by a stronger drain mode joins too, and overtakes the drain.
        """
        with self._lock:
            if self._has_failed or self.cancellation.requested:
                return False
            if request not in self._answered:
                overtaken = _overtaken(self.request, request)
                if overtaken is self.request or not _differ_only_in_drain(self.request, request):
                    return False
                self.request = overtaken
                self._answered.append(request)
            if self.lease is not None and request.prepare and not self.lease.renew(request.lease_s):
                return False
            self.callers += 1
            return True

    def hasten(self, request: OperationRequest) -> None:
        """Overtake its drain, as ``request`` waits behind it."""
        with self._lock:
            self.request = _overtaken(self.request, request)

    def fails_for(self, asked: OperationRequest) -> bool:
        """Note that its drain, as it was ``asked`` for, has failed; False if it was cancelled or overtaken instead."""
        with self._lock:
            self._has_failed = self.request is asked and not self.cancellation.requested
            return self._has_failed

    @property
    def blocks_others(self) -> bool:
        """Whether no other operation runs before somebody has committed or cancelled it."""
        return self.lease is not None and not self.lease.committed

    def hold(self) -> None:
        """Stay prepared until the commit; return at once if there was one, or if it is not to be prepared. Memory is
        moved from then on.

        Raises:
            OperationCancelledError: it was cancelled, or its lease has ended.
        """
        if not self.blocks_others:
            self.cancellation.begin_moving()
            return
        assert self.lease is not None
        assert self.log is not None
        with self.log.phase("prepared"):
            self.lease.begin()
            self.status = "prepared"
            self.lease.tell()
            try:
                self.lease.wait_for_commit()
            finally:
                self._progressed = time.monotonic()
                self.status = "running"

    def commit(self) -> bool:
        """Let it go on if it is prepared. From now on it answers those who ask for the same without preparing it."""
        with self._lock:
            if self.lease is None or not self.lease.commit():
                return False
            self._answered.append(replace(self.request, prepare=False))
            return True

    @property
    def phase(self) -> str:
        """The phase that runs now, or an empty string."""
        return self.log.now if self.log is not None and self.is_running else ""

    @property
    def is_running(self) -> bool:
        """Whether it has started and not ended; it may be prepared."""
        return self.status in ("running", "prepared")

    @property
    def has_ended(self) -> bool:
        return self.status != "queued" and not self.is_running

    @property
    def phase_starts(self) -> tuple[float, ...]:
        """When each phase began, in seconds since the epoch; the last may still run."""
        return self.log.starts if self.log is not None else ()

    @property
    def phases(self) -> tuple[PhaseReport, ...]:
        """The phases that have ended."""
        if self.report is not None:
            return self.report.phases
        return self.log.phases if self.log is not None else ()

    def elapsed_s(self) -> float:
        """Seconds since it started, or its duration if it has ended."""
        return time.monotonic() - self._started if self.is_running else self.seconds

    def stall(self) -> Stall | None:
        """Return the stall it is in, if any. Progress is detected between calls, so call this regularly."""
        if self.status != "running":
            return None
        phase, now = self.phase, time.monotonic()
        progress = (phase, len(self.phase_starts), self.request, self.memory.status().progress.done_bytes)
        if progress != self._progress:
            self._progress, self._progressed = progress, now
        idle = now - self._progressed
        limit = self.phase_timeout_s + self.request.patience_s(phase)
        return Stall(phase or "start", idle) if idle > limit else None

    def stall_message(self, stall: Stall) -> str:
        """Return what callers and the log are told about ``stall``."""
        return (
            f"{self.request.operation} {self.id} has made no progress in phase {stall.phase!r} for "
            f"{stall.seconds:.0f} s. It continues; GET /operations/{self.id} shows its result"
        )

    async def log_stalls(self, interval_s: float) -> None:
        """Log each phase in which it stalls, once; returns when the operation has ended."""
        logged = ""
        ended = self.ended()
        while not ended.done():
            await asyncio.wait({ended}, timeout=interval_s)
            stall = self.stall()
            if stall is not None and stall.phase != logged:
                logged = stall.phase
                logger.warning("%s", self.stall_message(stall))

    def ended(self) -> asyncio.Future[None]:
        """Return a future of the running event loop that is done once this operation is."""
        return _on_this_loop(self.done)

    def settled(self) -> asyncio.Future[None]:
        """As ``ended``, but it is done as well once this operation is prepared, if that was asked for."""
        return _on_this_loop(self.done if self.lease is None else self.lease.reached)

    def start(self) -> PhaseLog:
        """Mark it as running; its log reads the devices once."""
        self.status = "running"
        self.started_at = time.time()
        self._started = self._progressed = time.monotonic()
        self.log = PhaseLog(self.memory.read_devices)
        return self.log

    def finish(self, report: OperationReport | None, error: BaseException | None) -> None:
        """Record how it ended; ``done`` is not set yet. Does not raise."""
        self.seconds = time.monotonic() - self._started if self.started_at is not None else 0.0
        self.finished_at = time.time()
        self.report = None if report is None else replace(report, seconds=self.seconds)
        # The traceback's frames would keep this operation alive beyond the history.
        self.error = None if error is None else error.with_traceback(None)
        if error is not None and self.log is not None:
            self.failed_phase = self.log.failed
        try:
            self.state = self.memory.status().state
        except Exception:
            logger.exception("the state after %s %s cannot be read", self.request.operation, self.id)
        cancelled = isinstance(error, OperationCancelledError)
        self.status = "succeeded" if error is None else "cancelled" if cancelled else "failed"


def _on_this_loop(done: Future[None]) -> asyncio.Future[None]:
    """Return a future of the running event loop that is done once ``done`` is.

    Unlike ``asyncio.wrap_future`` it leaves no reference cycle, which would keep a forgotten operation alive until
    the next garbage collection.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def settle() -> None:
        if not ended.done():
            ended.set_result(None)

    def notify(_done: Future[None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle)

    done.add_done_callback(notify)
    return ended
