"""The one place that decides what the engine's memory is doing: the state machine behind every dialect.

Release: check tags -> close admission -> drain -> ms.release (synchronize, pause, empty_cache, ipc_collect, settle,
and where asked for trim and hibernate) -> report.
Resume: check tags -> ms.resume (wake, restore) -> repair -> reopen admission, if nothing the engine needs is still away
-> report.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from memsaver_core import PhaseLog
from memsaver_core.errors import MemsaverError, OutOfDeviceMemoryError, UnsupportedError
from memsaver_core.policies import keeps_all
from memsaver_core.reports import OperationReport, Status, TagStatus
from memsaver_server.engine import DrainMode, DrainTimeoutError, Engine, Memory, memory_of
from memsaver_server.operation_queue import Operation, Operations, ReleaseRequest, ResumeRequest, stall_message
from memsaver_server.settings import Settings

logger = logging.getLogger("memsaver")

#: How often a resume that waits for memory asks the device how much is free.
MEMORY_POLL_S = 0.05

#: The tags that every client names. What else a release of everything took comes back with the last of these: clients
#: that name what they resume know nothing of an engine's workspace, and some nothing of its graphs.
COMMON_TAGS = frozenset({"weights", "kv_cache"})

Paused = Literal["", "paused", "asleep"]


class NotEnoughToReleaseError(Exception):
    """``at_least_bytes`` is more than the tags asked for hold. Nothing was released."""

    def __init__(self, wanted: int, held: int) -> None:
        super().__init__(
            f"at_least_bytes is {wanted}, but the tags asked for hold {held} bytes on the device; nothing was released"
        )


class UnusableError(MemsaverError):
    """The device context is lost, or the engine is dead: no operation can succeed any more in this process."""


class NotResidentError(Exception):
    """What was asked for needs memory that is released. Nothing was done."""

    def __init__(self, tag: str) -> None:
        super().__init__(f"the memory of {tag!r} is released; resume it first")


class MemoryBusyError(MemsaverError):
    """Something else moves or writes the memory, and did not end in time. Nothing was done.

    Attributes:
        phase: what was waited for.
    """

    def __init__(self, phase: str, message: str) -> None:
        self.phase = phase
        super().__init__(message)


@dataclass(frozen=True)
class Moment:
    """What can be said of the process at one moment.

    Attributes:
        status: the core's account.
        state: ``resident``, ``releasing``, ``released``, ``resuming`` or ``failed``.
        closed_because: why the engine takes no requests, or an empty string where it does.
        running: the operation in work, or None.
    """

    status: Status
    state: str
    closed_because: str
    running: Operation | None


class Occupation:
    """What the engine occupies of the device, and the only way to change it.

    Every method may be called from any thread. ``release`` and ``resume`` return at once with the operation; the others
    block where they say so.
    """

    def __init__(self, engine: Engine, settings: Settings, on_finished: Callable[[Operation], None]) -> None:
        self._engine = engine
        #: What holds the engine's memory: this process, or the ranks that the engine reaches.
        self.memory = memory_of(engine)
        self._settings = settings
        self._on_finished = on_finished
        self.operations = Operations(settings.history, self._finished, self.memory, settings.phase_timeout_s)
        self._lock = threading.Lock()
        # Held while memory moves, and while weights are written into it.
        self._moving = threading.Lock()
        self._writing = False  # whether it is held for weights
        # Guarded by the lock, and all that admission depends on beside the core's own state.
        self._quiescing = ""
        self._paused: Paused = ""
        self._lost: set[str] = set()
        self._unnamed: set[str] = set()
        self._to_repair: set[str] = set()

    # -- release ---------------------------------------------------------------------------------------------------

    def release(
        self, request: ReleaseRequest, *, wait: bool = False, key: str | None = None, client: str = ""
    ) -> Operation:
        """Give the memory of ``request.tags`` back to the driver; the requests in flight are drained first.

        What is released already is success. After a failure admission is as it was, unless memory is away.

        Raises:
            UnknownTagError: a tag does not exist. Nothing was started.
            UnsupportedError: the process cannot be hibernated. Nothing was started.
            ConflictError, IdempotencyKeyError, TooManyOperationsError: see Operations.submit.
        """
        self.memory.check_tags(None if request.tags is None else list(request.tags))
        self.memory.check_tags([tag for tag, _ in request.restore])
        if request.hibernate and self.memory.enabled() and (reasons := self.memory.hibernation_obstacles()):
            raise UnsupportedError("the engine cannot be hibernated: " + "; ".join(reasons) + "; nothing was released")
        return self.operations.submit(request, self._release, wait=wait, key=key, client=client)

    def _release(self, operation: Operation) -> OperationReport:
        request, log = operation.request, operation.log
        assert isinstance(request, ReleaseRequest)
        assert log is not None
        if not self.memory.enabled():
            return self.memory.release(_listed(request.tags), log=log)
        self._check_usable()
        tags = self._cheapest(request)
        self._close_admission("memory is being released")
        try:
            with ExitStack() as moving:
                with log.phase("drain"):
                    ends = time.monotonic() + request.timeout_s
                    self._engine.drain(request.timeout_s, request.mode)
                    moving.enter_context(self._after_requests(request.timeout_s, ends))
                return self.memory.release(
                    tags, log=log, restore=dict(request.restore), trim=request.trim, hibernate=request.hibernate
                )
        finally:
            self._note_released(request, tags)
            self._reopen()

    def _cheapest(self, request: ReleaseRequest) -> list[str] | None:
        """Choose the tags to release: all that were asked for, or the cheapest that give ``at_least_bytes`` back."""
        if request.at_least_bytes is None:
            return _listed(request.tags)
        override = dict(request.restore)
        candidates = [
            tag
            for tag in self.memory.status().tags
            if tag.resident_bytes and (request.tags is None or tag.tag in request.tags)
        ]
        # Discarded before backed up, then what has a backup already; among equals the largest, so that few are touched.
        candidates.sort(key=lambda tag: (_keeps(tag, override), _uncopied(tag), -tag.resident_bytes))
        chosen: list[str] = []
        found = 0
        for tag in candidates:
            if found >= request.at_least_bytes:
                break
            chosen.append(tag.tag)
            found += tag.resident_bytes
        if found < request.at_least_bytes:
            raise NotEnoughToReleaseError(request.at_least_bytes, found)
        return chosen

    # -- resume ----------------------------------------------------------------------------------------------------

    def resume(
        self, request: ResumeRequest, *, wait: bool = False, key: str | None = None, client: str = ""
    ) -> Operation:
        """Bring the memory of ``request.tags`` back, and admission with it once nothing the engine needs is away.

        What is resident already is success. After a failure all of it is still released and the call can be repeated.

        Raises:
            As release.
        """
        self.memory.check_tags(None if request.tags is None else list(request.tags))
        return self.operations.submit(request, self._resume, wait=wait, key=key, client=client)

    def _resume(self, operation: Operation) -> OperationReport:
        request, log = operation.request, operation.log
        assert isinstance(request, ResumeRequest)
        assert log is not None
        if not self.memory.enabled():
            return self.memory.resume(_listed(request.tags), log=log)
        self._check_usable()
        away = released_tags(self.memory.status())
        tags = self._with_unnamed(request.tags, away)
        if away or self._to_repair or self.memory.status().hibernated:
            self._close_admission("memory is being resumed")
        try:
            report = self._restore(tags, request.wait_for_memory_s, log)
            self._note_resumed(away)
            with log.phase("repair"):
                self._repair()
            with log.phase("reopen"):
                self._reopen()
        except BaseException:
            self._note_resumed(away)
            self._reopen()
            raise
        return replace(report, phases=log.phases)

    def _with_unnamed(self, tags: tuple[str, ...] | None, away: set[str]) -> list[str] | None:
        """Add to ``tags`` what nobody would ask for after them, though a release of everything took it too."""
        if tags is None:
            return None
        left = away - set(tags)
        with self._lock:
            alone = left <= self._unnamed and not left & COMMON_TAGS
        return [*tags, *sorted(left)] if alone else list(tags)

    def _restore(self, tags: list[str] | None, wait_for_memory_s: float, log: PhaseLog) -> OperationReport:
        deadline = time.monotonic() + wait_for_memory_s
        while True:
            try:
                with self._after_weights(log):
                    return self.memory.resume(tags, log=log)
            except OutOfDeviceMemoryError as short:
                if time.monotonic() >= deadline:
                    raise
                with log.phase("wait_for_memory"):
                    _wait_for_memory(self.memory, short, deadline)

    def _repair(self) -> None:
        with self._lock:
            tags, lost = sorted(self._to_repair), sorted(self._to_repair & self._lost)
        if tags:
            self._engine.repair(tags, lost)
        with self._lock:
            self._to_repair.difference_update(tags)
            self._lost.difference_update(lost)

    # -- scheduling ------------------------------------------------------------------------------------------------

    def pause(self, mode: DrainMode, timeout_s: float, *, asleep: bool = False) -> None:
        """Stop generating until ``continue_generation``; memory stays as it is. Blocks for the drain.

        Args:
            asleep: ``is_sleeping`` is to say so.

        Raises:
            DrainTimeoutError: requests still run. Generation is as it was.
        """
        with self._lock:
            before = self._paused
            self._paused = "asleep" if asleep else before or "paused"
            self._settle_admission()
        try:
            self._engine.drain(timeout_s, mode)
        except BaseException:
            with self._lock:
                self._paused = before
                self._settle_admission()
            raise

    def continue_generation(self) -> str:
        """Undo ``pause``; while memory is away this is remembered, and admission opens when it is back.

        Returns:
            Why admission is still closed, or an empty string.
        """
        with self._lock:
            self._paused = ""
            return self._settle_admission()

    def flush_cache(self) -> None:
        """Forget the engine's cached prefixes, whatever state the memory is in."""
        self._engine.flush_cache()

    # -- weights ---------------------------------------------------------------------------------------------------

    def update_weights(self, write: Callable[[], int]) -> int:
        """Run ``write``, which overwrites weights in place; neither a release nor a resume overlaps it. Blocks.

        Raises:
            NotResidentError: the weights are released. ``write`` was not called.
            MemoryBusyError: an operation is stuck, or another update has not ended. ``write`` was not called.
        """
        with self._after_all():
            if "weights" in released_tags(self.memory.status()) or self.memory.status().hibernated:
                raise NotResidentError("weights")
            return write()

    # -- turns at the memory ---------------------------------------------------------------------------------------

    @contextmanager
    def _after_requests(self, timeout_s: float, ends: float) -> Iterator[None]:
        """A release's turn: a weight update in flight is a request in flight, and has until ``ends``, too."""
        if not self._moving.acquire(timeout=max(0.0, ends - time.monotonic())):
            raise DrainTimeoutError(timeout_s, ["a weight update"])
        try:
            yield
        finally:
            self._moving.release()

    @contextmanager
    def _after_weights(self, log: PhaseLog) -> Iterator[None]:
        """A resume's turn."""
        if not self._moving.acquire(blocking=False):
            with log.phase("wait_for_weights"):
                if not self._moving.acquire(timeout=self._settings.phase_timeout_s):
                    raise self._update_too_long("nothing was resumed")
        try:
            yield
        finally:
            self._moving.release()

    @contextmanager
    def _after_all(self) -> Iterator[None]:
        """A weight update's turn. An operation in work is waited for as long as it gets on."""
        while not self._moving.acquire(timeout=self._settings.phase_timeout_s):
            if self._writing:
                raise self._update_too_long("nothing was written")
            running = self.operations.running
            if running is not None and (stall := running.stall()) is not None:
                raise MemoryBusyError(stall.phase, f"no weights were written: {stall_message(running, stall)}")
        self._writing = True
        try:
            yield
        finally:
            self._writing = False
            self._moving.release()

    def _update_too_long(self, consequence: str) -> MemoryBusyError:
        return MemoryBusyError(
            "wait_for_weights",
            f"a weight update has not ended after {self._settings.phase_timeout_s:g} s; {consequence}. Repeat the call "
            "when it is done",
        )

    # -- what can be asked -----------------------------------------------------------------------------------------

    def now(self) -> Moment:
        """What can be said now, by one look at the core: each may have to wait for its turn with the interpreter."""
        status = self.memory.status()
        running = self.operations.running
        state = status.state
        if state != "failed" and running is not None and running.status == "running":
            state = "releasing" if running.request.operation == "release" else "resuming"
        with self._lock:
            return Moment(status, state, self._closed_because(status), running)

    @property
    def state(self) -> str:
        """The process's state: ``resident``, ``releasing``, ``released``, ``resuming`` or ``failed``."""
        return self.now().state

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is away, or generation was put to sleep without releasing any."""
        status = self.memory.status()
        return bool(released_tags(status)) or status.hibernated or self._paused == "asleep"

    def is_alive(self) -> bool:
        """Whether this process can still serve, now or once it is resumed."""
        return self.memory.status().state != "failed" and self._engine.is_alive()

    # -- admission -------------------------------------------------------------------------------------------------

    def _close_admission(self, reason: str) -> None:
        with self._lock:
            self._quiescing = reason
            self._engine.close_admission(reason, hold=self._hold())

    def _reopen(self) -> None:
        """End what ``_close_admission`` began, and leave admission as the state demands."""
        with self._lock:
            self._quiescing = ""
            self._settle_admission()

    def _settle_admission(self) -> str:
        """Open admission where nothing stands in the way; where something does, return what. Needs the lock."""
        reason = self._closed_because(self.memory.status())
        if reason:
            self._engine.close_admission(reason, hold=self._hold())
        else:
            self._engine.open_admission()
        return reason

    def _closed_because(self, status: Status) -> str:
        if status.state == "failed":
            return f"the device context is lost: {status.failure}"
        if self._quiescing:
            return self._quiescing
        if status.hibernated:
            return "the process is hibernated"
        away = released_tags(status)
        if away:
            return f"memory of {', '.join(sorted(away))} is released"
        if self._to_repair:
            return f"the engine is not whole yet after {', '.join(sorted(self._to_repair))} came back; resume again"
        if self._paused:
            return "generation is paused"
        return ""

    def _hold(self) -> int:
        """How many new requests may wait: a paused engine holds them, a released one where the operator wants that."""
        paused_alone = self._paused and not self._quiescing and not released_tags(self.memory.status())
        return self._settings.queue_limit if paused_alone or self._settings.while_released == "queue" else 0

    # -- the rest --------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        status = self.memory.status()
        if status.state == "failed":
            raise UnusableError(f"the device context is lost ({status.failure}); restart the engine")

    def _note_released(self, request: ReleaseRequest, tags: Sequence[str] | None) -> None:
        """Remember whose content this release gave up. Asked of the core, so that a failed one counts as well."""
        gone = [tag for tag in self.memory.status().tags if tag.released_bytes and (tags is None or tag.tag in tags)]
        with self._lock:
            self._lost.update(tag.tag for tag in gone if not _keeps(tag, dict(request.restore)))
            if request.tags is None:
                self._unnamed.update(tag.tag for tag in gone)
            else:
                self._unnamed.difference_update(request.tags)

    def _note_resumed(self, away: set[str]) -> None:
        back = away - released_tags(self.memory.status())
        with self._lock:
            self._to_repair.update(back)
            self._unnamed.difference_update(back)

    def _finished(self, operation: Operation) -> None:
        try:
            self._on_finished(operation)
        except Exception:
            logger.exception("operation %s is done, but could not be recorded", operation.id)


def released_tags(status: Status) -> set[str]:
    """Return the tags with memory that is not there: while any is, no request may reach a kernel."""
    return {tag.tag for tag in status.tags if tag.released_bytes or tag.state in ("releasing", "resuming")}


def _listed(tags: tuple[str, ...] | None) -> list[str] | None:
    return None if tags is None else list(tags)


def _keeps(tag: TagStatus, override: dict[str, str]) -> bool:
    return keeps_all(override.get(tag.tag, tag.restore))


def _uncopied(tag: TagStatus) -> bool:
    return tag.backed_up_bytes < tag.bytes


def _wait_for_memory(memory: Memory, short: OutOfDeviceMemoryError, deadline: float) -> None:
    """Return when the device has what was missing, or at the deadline. No co-tenant tells when it lets go."""
    while time.monotonic() < deadline:
        time.sleep(max(0.0, min(MEMORY_POLL_S, deadline - time.monotonic())))
        for device in memory.read_devices():
            if device.index == short.device and device.total_bytes - device.used_bytes >= short.needed_bytes:
                return
