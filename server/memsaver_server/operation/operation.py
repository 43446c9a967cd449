"""An operation: one release, resume or resize, from the request to its report."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

from memsaver_core.contract import errors
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.reports import OperationReport, OperationStatus, PhaseReport, ProgressAnswer, Stall
from memsaver_core.contract.requests import OPPOSITE, Asked, DrainMode, Release
from memsaver_core.contract.status import DeviceMemory, PreparedState, Progress, Status
from memsaver_core.phases import PhaseLog
from memsaver_server import clock
from memsaver_server.operation.table import Table
from memsaver_server.threads import on_this_loop

logger = logging.getLogger("memsaver")

#: The client of the resizes by which KV caches balance themselves. Other callers' resizes cancel these.
BALANCER = "memsaver-balance"
#: Who cancels an operation whose lease has ended.
LEASE_END = "the end of its lease"
#: Drain modes, the weakest first.
_STRENGTH: tuple[DrainMode, ...] = ("wait", "keep", "abort")


def _overtaken(release: Asked, by: Asked) -> Release | None:
    """Return ``release`` with the mode of ``by`` and the longer deadline; None unless both release the same tags, and
    ``by`` has the stronger mode."""
    if not isinstance(release, Release) or not isinstance(by, Release) or release.tags != by.tags:
        return None
    if _STRENGTH.index(by.mode) <= _STRENGTH.index(release.mode):
        return None
    timeout_s = max(release.timeout_s or 0.0, by.timeout_s or 0.0)
    return release.model_copy(update={"mode": by.mode, "timeout_s": timeout_s})


def tag_list(tags: Sequence[str]) -> str:
    """Return ``tags`` as messages name them; none means all."""
    return ", ".join(tags) or "all tags"


class Moved(Protocol):
    """What an operation reads of the memory that it moves."""

    def status(self) -> Status: ...

    def read_devices(self) -> tuple[DeviceMemory, ...]: ...


@dataclass(eq=False)
class Operation:
    """One release, resume or resize. Every method may be called from any thread; fields are read without the lock."""

    id: str
    request: Asked  # of its first caller; a repeat with a stronger drain replaces it
    client: str  # its first caller
    table: Table
    #: The Idempotency-Key of the first call, or None. With ``prepare``, this key proves who the owner is.
    key: str | None = field(default=None, repr=False)
    memory: Moved | None = None  # what it moves; None for an operation of a fleet, and for one that is forgotten
    phase_timeout_s: float = math.inf  # seconds without progress after which a phase counts as stalled
    #: Guards the fields below; a queue's operations share it. Its holder takes no other lock of the service.
    changed: threading.Condition = field(default_factory=threading.Condition)
    state: str = field(init=False)  # in ``table``
    cancelled_by: str | None = None  # who has cancelled it; without effect if that was too late
    forced_by: str | None = None  # who has cancelled it without being its owner
    committed: bool = False  # it was prepared, and its owner has committed it
    callers: int = 1  # how many calls it answers
    created_at: float = field(default_factory=time.time)
    started_at: float | None = None
    finished_at: float | None = None
    seconds: float = 0.0
    log: PhaseLog = field(default_factory=lambda: PhaseLog(tuple))  # of its work, once that has begun
    report: OperationReport | None = None
    error: BaseException | None = None
    memory_state: str = ""  # when it ended
    weights_version: str | None = None  # when its work was done
    done: Future[None] = field(default_factory=Future)
    _settled: Future[None] = field(default_factory=Future)
    _started: float = 0.0
    _progressed: float = field(default_factory=clock.monotonic)
    _progress: tuple[object, ...] = ()
    _lease_ends: float | None = None  # on the monotonic clock

    def __post_init__(self) -> None:
        self.state = self.table.first
        # A waiter that is cancelled because its client went away must not cancel the wait of the others.
        self.done.set_running_or_notify_cancel()
        self._settled.set_running_or_notify_cancel()
        self._lease_s = self.request.lease_s
        self._answered = [self.request.digest()]

    # What callers see.

    @property
    def status(self) -> OperationStatus:
        return self.table.statuses[self.state]

    @property
    def is_running(self) -> bool:
        """Whether it has started and not ended; it may be prepared."""
        return self.status in ("running", "prepared")

    @property
    def has_ended(self) -> bool:
        return self.status not in ("queued", "running", "prepared")

    @property
    def blocks_others(self) -> bool:
        """Whether no other operation runs before a caller has committed or cancelled it."""
        return self.request.prepare and not self.committed

    @property
    def answers_repeats(self) -> bool:
        """Whether it answers a repeat under one of its keys: not if it failed, or was cancelled and has ``prepare``."""
        return self.status != "failed" and not (self.status == "cancelled" and self.request.prepare)

    @property
    def phase(self) -> str:
        return self.log.now if self.is_running else ""

    @property
    def phase_starts(self) -> tuple[float, ...]:
        """When each phase began, in seconds since the epoch; the last may still run."""
        return self.log.starts

    @property
    def phases(self) -> tuple[PhaseReport, ...]:
        return self.log.phases if self.report is None else self.report.phases

    @property
    def progress(self) -> Progress:
        return Progress() if self.memory is None else self.memory.status().progress

    def copies(self) -> ProgressAnswer | None:
        """Return the progress of its copies as the core counts it, or None while nothing is copied."""
        now = self.progress
        if not self.is_running or now.operation != self.request.operation:
            return None
        rate = now.done_bytes / now.seconds if now.seconds > 0 else 0.0
        return ProgressAnswer(
            done_bytes=now.done_bytes,
            total_bytes=now.total_bytes,
            copied_bytes=now.copied_bytes,
            gb_per_s=rate / 1e9,
            seconds_left=(now.total_bytes - now.done_bytes) / rate if rate else None,
        )

    def elapsed_s(self) -> float:
        return clock.monotonic() - self._started if self.is_running else self.seconds

    def lease_left_s(self) -> float:
        """Seconds until its lease ends; those of the whole lease before it is prepared."""
        return self._lease_s if self._lease_ends is None else max(0.0, self._lease_ends - clock.monotonic())

    def prepared_state(self) -> PreparedState:
        """Return what status calls report of it while it is prepared."""
        verb, lease_s = self.request.operation, self.lease_left_s()
        return PreparedState(operation_id=self.id, client=self.client, operation=verb, lease_s=lease_s)

    def stall(self) -> Stall | None:
        """Return the stall it is in, if any. Progress is detected between calls, so call this regularly."""
        if self.status != "running":
            return None
        phase, now = self.phase, clock.monotonic()
        progress = (phase, len(self.phase_starts), self.request, self.progress.done_bytes)
        if progress != self._progress:
            self._progress, self._progressed = progress, now
        idle = now - self._progressed
        limit = self.phase_timeout_s + self.request.patience_s(phase)
        return Stall(phase=phase or "start", seconds=idle) if idle > limit else None

    def stall_message(self, stall: Stall) -> str:
        """Return the message about ``stall`` for callers and the log."""
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
        return on_this_loop(self.done)

    def settled(self) -> asyncio.Future[None]:
        """As ``ended``, but also done once this operation is prepared, if it was to be."""
        return on_this_loop(self._settled)

    def is_shared_with(self, key: str | None, client: str) -> bool:
        """Whether an equal call may join it: while it awaits a commit, only one with its key or, if it has no key, of
        the same client."""
        return not self.blocks_others or (key == self.key if self.key is not None else client == self.client)

    @property
    def engines(self) -> dict[str, str]:
        """The stage of each engine, as in ``FleetProgress``; none for an operation of one engine."""
        return {}

    def described(self) -> dict[str, object]:
        """Return what callers see of it, besides what they see of every operation."""
        return {}

    def audited(self) -> dict[str, object]:
        """Return its fields in the audit log beyond those of every operation."""
        return {} if self.forced_by is None else {"forced_by": self.forced_by}

    def conflict(self, refused: str, advice: str) -> errors.ConflictError:
        """Return the error of a call that this operation prevents: what is ``refused``, and what the caller can do."""
        owner = (self.client, self.lease_left_s()) if self.blocks_others else (None, None)
        message = f"{refused}: {self.in_progress()}. {advice}"
        return errors.ConflictError(message, self.request.operation, self.id, *owner)

    def in_progress(self) -> str:
        """Return the sentence that it is in progress or prepared, for messages."""
        lease = f"prepared by {self.client}, whose lease ends in {self.lease_left_s():.0f} s"
        now = lease if self.blocks_others else "in progress"
        return f"{self.request.operation} {self.id} of {tag_list(self.request.tags)} is {now}"

    def check_owner(self, key: str | None, forced_by: str | None = None) -> None:
        """Raise ConflictError if it has ``prepare``, another key and no commit yet; not if somebody forces it."""
        if self.key in (None, key) or not self.blocks_others or self.has_ended:
            return
        if forced_by is None:
            refused = "this call does not have the Idempotency-Key of the operation's owner"
            raise self.conflict(refused, "Send that key, wait, or abort it by force")
        self.forced_by = forced_by

    # What callers do.

    def join(self, request: Asked) -> bool:
        """Let this operation answer another call if its result is what ``request`` asks for; return whether it does. A
        release that differs by a stronger drain mode joins, too: it overtakes the drain. A prepare renews the lease."""
        with self.changed:
            self._note_lease_end()
            answered = request.digest() in self._answered
            overtaken = None if answered else _overtaken(self.request, request)
            if overtaken is not None:  # it has the request's mode; compare everything else
                same_drain = request.model_copy(update={"timeout_s": overtaken.timeout_s})
                answered = same_drain.digest() == overtaken.digest()
            event = "renew" if request.prepare else "join" if overtaken is None else "overtake"
            if not answered or self.cancelled_by is not None or not self.table.allows(self.state, event):
                return False
            if overtaken is not None:
                self.request = overtaken
                self._answered.append(request.digest())
            self.renew(request)
            self.callers += 1
            return True

    def renew(self, request: Asked) -> None:
        """Let its lease last at least ``request.lease_s`` from now. Once prepared, only ``prepare`` renews it."""
        with self.changed:
            if self._lease_ends is None:
                self._lease_s = max(self._lease_s, request.lease_s)
            elif request.prepare:
                self._lease_ends = max(self._lease_ends, clock.monotonic() + request.lease_s)

    def expedite(self, request: Asked, client: str) -> None:
        """Make it end sooner, as ``request`` of ``client`` waits: overtake its drain, or cancel a resize."""
        with self.changed:
            if self.request.operation == "resize" and (request.operation != "resize" or self.client == BALANCER):
                with suppress(errors.TooLateToCancelError):
                    self.cancel(f"a {request.operation} of {client}")
                return
            overtaken = _overtaken(self.request, request)
            if overtaken is not None and self.table.allows(self.state, "overtake"):
                self.request = overtaken

    def cancel(self, by: str) -> None:
        """Cancel on behalf of ``by``. A queued one ends at once, others soon; this does not notify callers. Idempotent.
        Raises TooLateToCancelError if it moves memory already, or has ended."""
        with self.changed:
            if not self.has_ended:
                self.cancelled_by = self.cancelled_by or by
            if self.status == "queued":
                self.finish(None, self._cancellation())
                return
            self.advance("cancel")
            self.changed.notify_all()

    def commit(self, key: str | None = None) -> None:
        """Let it go on if it is prepared. From now on equal calls without ``prepare`` may join it. Idempotent. Raises
        ConflictError if it was prepared under another key, LeaseEndedError if it is neither prepared nor committed."""
        with self.changed:
            if self.committed:
                return
            self.check_owner(key)
            self._note_lease_end()
            self.advance("commit")
            self.committed = True
            self._answered.append(self.request.model_copy(update={"prepare": False}).digest())
            self.changed.notify_all()

    # For what carries it out.

    def start(self, event: str) -> None:
        with self.changed:
            self.started_at = time.time()
            self._started = self._progressed = clock.monotonic()
            self.advance(event)

    def check(self) -> None:
        """Raise OperationCancelledError if it was cancelled in time."""
        if self.cancelled_by is not None and self.table.allows(self.state, "cancelled"):
            raise self._cancellation()

    def await_commit(self) -> None:
        """Stay prepared until the commit; return at once if there was one, or if it is not to be prepared. From then on
        memory is moved, without interruption. Raises OperationCancelledError if it was cancelled or its lease ended."""
        if not self.blocks_others:
            with self.changed:
                self.check()
                self.advance("move")
            return
        with self.log.phase(Phase.PREPARED):
            with self.changed:
                self.check()
                self._lease_ends = clock.monotonic() + self._lease_s
                self.advance("prepare")
            self._settled.set_result(None)
            with self.changed:
                while self.state == "prepared":
                    clock.wait(self.changed, self.lease_left_s())
                    self._note_lease_end()
                self._progressed = clock.monotonic()
                self.check()

    def move_later(self) -> None:
        """Wait again, as memory is short and nothing was moved. Raises OperationCancelledError if it was cancelled."""
        with self.changed:
            self.advance("shortage")
            if self.cancelled_by is not None:
                self.advance("cancel")
            self.check()

    def moved(self, report: OperationReport) -> OperationReport:
        """Note that memory was moved; return the ``report`` of that."""
        with self.changed:
            self.advance("moved")
        return report

    def begin_undo(self, asked: Asked | None = None) -> bool:
        """Begin to undo it after an error; no call joins it any more. Return False, and change nothing, if memory was
        moved, it was cancelled, or its drain was overtaken since ``asked``."""
        with self.changed:
            ends = self.table.allows(self.state, "error") and (asked is None or asked is self.request)
            if ends:
                self.advance("error")
            return ends

    def as_forgotten(self) -> Operation:
        """Return a copy that answers repeats after it is forgotten: without phases, and without figures by tag and
        device."""
        kept = copy(self)
        kept.memory, kept.log = None, PhaseLog(tuple)
        if self.error is not None:  # the errors that led to it have tracebacks, too
            self.error.__context__ = self.error.__cause__ = None
        if self.report is not None:
            kept.report = self.report.model_copy(update={"tags": (), "phases": (), "devices": ()})
        return kept

    def finish(self, report: OperationReport | None, error: BaseException | None) -> None:
        """Record how it ended. ``answer_callers`` then notifies its callers."""
        with self.changed:
            if error is not None:
                self.begin_undo()
            self.seconds = clock.monotonic() - self._started if self.started_at is not None else 0.0
            self.finished_at = time.time()
            self.report = None if report is None else report.model_copy(update={"seconds": self.seconds})
            # The traceback's frames would keep this operation alive beyond the history.
            self.error = None if error is None else error.with_traceback(None)
            try:
                self.memory_state = "" if self.memory is None else self.memory.status().state
            except Exception:
                logger.exception("the state after %s %s cannot be read", self.request.operation, self.id)
            ending = "done" if error is None else "failed"
            if isinstance(error, errors.OperationCancelledError):
                ending = "cancel" if self.status == "queued" else "cancelled"
            self.advance(ending)  # last, for readers without the lock

    def answer_callers(self) -> None:
        self.done.set_result(None)
        if not self._settled.done():
            self._settled.set_result(None)

    def advance(self, event: str) -> None:
        """Go to the table's next state; raise TooLateToCancelError or LeaseEndedError if the table refuses the event.
        The caller holds the lock."""
        to = self.table.next(self.state, event)
        if not isinstance(to, str):
            raise self._refusal(to)
        self.state = to

    # With the lock held.

    def _note_lease_end(self) -> None:
        if self.state == "prepared" and not self.lease_left_s():
            self.cancelled_by = LEASE_END
            self.advance("lease_end")

    def _cancellation(self) -> errors.OperationCancelledError:
        by = self.cancelled_by or ""
        return errors.OperationCancelledError(
            f"{self.request.operation} {self.id} of {tag_list(self.request.tags)} was cancelled by {by}; memory and "
            "admission are as before. Repeat the call if needed",
            by,
        )

    def _refusal(self, kind: type[errors.MemsaverError]) -> errors.MemsaverError:
        verb = self.request.operation
        if kind is errors.LeaseEndedError:
            if not self.request.prepare:
                why = "it was not prepared, and needs no commit"
            elif self.cancelled_by is not None:
                why = f"it was cancelled by {self.cancelled_by}; memory and admission are as before"
            else:
                why = str(self.error) if self.error is not None else "it is not prepared yet"
            message = f"{verb} {self.id} cannot be committed: {why}. Prepare again if needed"
            return errors.LeaseEndedError(message, self.id, self.cancelled_by if self.request.prepare else None)
        if self.has_ended:
            happens = "has ended already"
        elif verb == "resume":
            happens = "is mapping memory already and will complete if the device has enough"
        else:
            happens = f"is {'moving' if verb == 'resize' else 'unmapping'} memory already and will complete"
        undo = "resize again" if verb == "resize" else f"{OPPOSITE[verb]} the tags"
        message = f"{verb} {self.id} cannot be cancelled: it {happens}; to undo it, {undo}"
        return errors.TooLateToCancelError(message, self.id)
