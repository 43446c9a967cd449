"""The state machine of the engine's memory, behind every dialect.

Release: check tags -> close admission -> drain -> release the memory -> report.
Resume: check tags -> resume the memory -> repair -> verify if asked -> open admission if nothing is released -> report.
The steps of the memory itself are in ``memsaver_core.contract.phases``.

A thread that holds several of the service's locks has taken them in this order, which tests check: that of the memory
(here; held while memory moves or weights are written), that of admission (held while the engine is called), that of the
operations (``OperationQueue``; not held while an operation runs).
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from memsaver_core.contract import errors
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.policies import COMMON_TAGS, keeps_any
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import DrainMode, Release, ResizeKvCache, Resume
from memsaver_core.contract.status import Status, TagStatus
from memsaver_core.manifests import source_of
from memsaver_core.phases import PhaseLog
from memsaver_server import clock
from memsaver_server.engine import DataParallelEngine, Engine, WatchedMemory, memory_of, unwritten_weights, waits
from memsaver_server.engine.admission import Admission, failed_for_good
from memsaver_server.engine.tag_selection import (
    asleep_dp_ranks,
    keeps_content,
    lost_tags,
    narrowed,
    needs_writing,
    released_tags,
)
from memsaver_server.engine.verification import Verification
from memsaver_server.operation.operation import Operation
from memsaver_server.operation.queue import OperationQueue
from memsaver_server.settings import Settings

logger = logging.getLogger("memsaver")

_T = TypeVar("_T")

#: Interval at which a resume that waits for device memory reads how much is free, seconds.
MEMORY_POLL_S = 0.05


@dataclass(frozen=True)
class Snapshot:
    """The process at one moment."""

    status: Status  # the core's account
    state: str  # ``resident``, ``releasing``, ``released``, ``resuming`` or ``failed``
    closed_reason: str  # why the engine accepts no requests, or an empty string if it does
    running: Operation | None
    unwritten: frozenset[str]  # the tags whose content is lost until it is written again
    updating: bool  # an update writes weights


class Lifecycle:
    """Releases and resumes an engine's memory. Every method may be called from any thread.

    ``start`` returns at once with the operation; others block if they say so.
    """

    def __init__(self, engine: Engine, settings: Settings, on_finished: Callable[[Operation], None]) -> None:
        self._engine = engine
        self._phase_timeout_s = settings.phase_timeout_s
        #: The engine's memory: of this process, or of the ranks that the engine reaches.
        self.memory = memory_of(engine)
        self.operations = OperationQueue(settings.history, on_finished, self.memory, settings.phase_timeout_s)
        self.operations.weights_version = lambda: self.weights_version
        self._admission = Admission(engine, self.memory, settings)
        if isinstance(self.memory, WatchedMemory):
            self.memory.on_failure(self._admission.reopen)  # after a failure this closes it for good
        self._moving = threading.Lock()  # the memory lock: releases, resumes and weight updates exclude each other
        self._updating = False  # its holder is a weight update
        #: What the last update named the weights; None if it named nothing, or they are lost.
        self.weights_version: str | None = None
        # Tags that only a release of everything has taken, so that a client may never name them in a resume.
        self._implicit: frozenset[str] = frozenset()
        self._verification = Verification(engine, self._admission, self.memory, settings)
        #: ``ElasticCache.fit``, if the engine can resize its KV cache.
        self.fit_cache: Callable[[Callable[[], OperationReport]], OperationReport] | None = None
        #: ``Balancer.release`` and ``Balancer.ask``, if the KV cache balances itself.
        self.release_cache: Callable[[Callable[[], OperationReport]], OperationReport] = lambda work: work()
        self.ask_for_memory: Callable[[int], None] = lambda needed_bytes: None

    def start(self, request: Release | Resume, *, key: str | None = None, client: str = "") -> Operation:
        """Begin a release or a resume, or join the one in flight; returns at once.

        A release returns the memory of the tags to the driver, after the requests in flight are drained. A tag that is
        released already is success. After a failure admission is as before, unless memory is released.

        A resume brings the memory of the tags back, and reopens admission once nothing is released. A tag that is
        resident already is success. After a failure all is still released and the call can be repeated.

        With ``request.prepare`` either stops before memory is moved, until its ``commit`` or the end of its lease.

        Nothing was started if this raises UnknownTagError, UnsupportedError (the process cannot be hibernated),
        VerificationUnavailableError (a release cannot be verified), or as OperationQueue.submit.
        """
        self.memory.check_tags(request.tags)
        if isinstance(request, Resume):
            if request.dp_ranks:
                self._check_part(request)
            if request.kv_cache == "shrink" and self.fit_cache is None:
                raise errors.UnsupportedError("this engine cannot resume with a smaller KV cache; nothing was resumed")
            return self.operations.submit(request, partial(self._resume, request), key=key, client=client)
        self.memory.check_tags(tuple(request.restore))
        if request.hibernate and self.memory.enabled() and (reasons := self.memory.hibernation_obstacles()):
            raise errors.UnsupportedError(
                f"the engine cannot be hibernated: {'; '.join(reasons)}; nothing was released"
            )
        self.check(request)
        return self.operations.submit(request, partial(self._release, request), key=key, client=client)

    def _release(self, request: Release, operation: Operation, log: PhaseLog) -> OperationReport:
        if not self.memory.enabled():
            operation.await_commit()
            return operation.moved(self.memory.release(request, log=log))
        self._check_usable()
        before = self.status_of(request).tags
        asked = narrowed(request, before)
        self._admission.close_for("memory is being released", request.dp_ranks)
        try:
            with ExitStack() as until_released:
                with log.phase(Phase.DRAIN):
                    self._drain(operation)
                    until_released.callback(self._moving.release)
                    if not request.prepare:
                        operation.await_commit()
                if not request.dp_ranks:
                    self._verification.before_release(request, log)
                if request.prepare:
                    with log.phase(Phase.CHECK):
                        self.memory.check_release(asked)
                    operation.await_commit()
                work = partial(self.memory.release, asked, log=log)
                try:
                    return operation.moved(self.release_cache(work) if _gives_up_cache(asked, before) else work())
                finally:
                    self._note_released(request, asked, before)
        except BaseException:
            operation.begin_undo()
            if request.prepare:
                self.memory.give_back_reserved()
            raise
        finally:
            self._admission.reopen()

    def _drain(self, operation: Operation) -> None:
        """Drain the engine with the mode and the deadline that callers ask for now, and take the memory lock; a weight
        update counts as a request in flight. Raises DrainTimeoutError or OperationCancelledError."""
        # Engines written for version 0.1 have no parameter ``given_up``: nothing can end their drains early.
        can_give_up = "given_up" in inspect.signature(self._engine.drain).parameters
        while True:
            asked = operation.request
            assert isinstance(asked, Release)
            timeout_s = asked.timeout_s or 0.0
            deadline = clock.monotonic() + timeout_s

            def given_up(asked: Release = asked) -> bool:
                return operation.cancelled_by is not None or operation.request is not asked

            try:
                if isinstance(self._engine, DataParallelEngine):
                    self._engine.drain(timeout_s, asked.mode, given_up, asked.dp_ranks)
                else:
                    self._engine.drain(timeout_s, asked.mode, *([given_up] if can_give_up else []))
                if self._take(deadline, given_up):
                    return
                raise errors.DrainTimeoutError(timeout_s, ["a weight update"])
            except errors.DrainTimeoutError:
                if operation.begin_undo(asked):
                    raise
            operation.check()

    def _resume(self, request: Resume, operation: Operation, log: PhaseLog) -> OperationReport:
        if not self.memory.enabled():
            operation.await_commit()
            return operation.moved(self.memory.resume(request, log=log))
        self._check_usable()
        status = self.status_of(request)
        released = released_tags(status)
        request = request.model_copy(update={"tags": self.tags_to_resume(request)})
        held = self.memory.status()
        in_part = self._admission.serves_in_part(held)
        if released or self._admission.needs_repair() or status.hibernated:
            self._admission.close_for("memory is being resumed", asleep_dp_ranks(held))
        try:
            report = self._bring_back(request, operation, log)
            self._note_resumed(request, released)
            with log.phase(Phase.REPAIR):
                self._admission.repair()
        except BaseException:
            operation.begin_undo()
            self._note_resumed(request, released)
            self._admission.reopen()
            raise
        try:
            if not in_part:  # else the verification would stop the engines that serve
                self._verification.after_resume(request, log, resumed=bool(released) or status.hibernated)
        finally:
            with log.phase(Phase.REOPEN):
                self._admission.reopen()
        return report.model_copy(update={"phases": log.phases})

    def status_of(self, request: Release | Resume) -> Status:
        """Return the status of the data-parallel engines that ``request`` selects, by default of all."""
        if request.dp_ranks and isinstance(self.memory, WatchedMemory):
            return self.memory.status_of(request.dp_ranks)
        return self.memory.status()

    def tags_to_resume(self, request: Resume) -> tuple[str, ...]:
        """Return the tags that ``request`` brings back; none means all that are released.

        Released tags that no client names come back with the last of the others.
        """
        left = released_tags(self.status_of(request)) - set(request.tags)
        complete = request.tags and left <= self._implicit and not left & COMMON_TAGS
        return (*request.tags, *sorted(left)) if complete else request.tags

    def with_room(self, operation: Operation, log: PhaseLog, wait_s: float, work: Callable[[], _T]) -> _T:
        """Return the result of ``work``, which runs on this thread and needs device memory and the memory lock. If
        memory is short, call it again once there is enough; raise OutOfDeviceMemoryError after ``wait_s``.
        Raises MemoryBusyError if a weight update takes too long, or OperationCancelledError."""
        deadline = clock.monotonic() + wait_s
        while True:
            self._take_between_updates(operation, log)
            try:
                self.ask_for_memory(0)  # end the last attempt's request: others would give as much again
                return work()
            except errors.OutOfDeviceMemoryError as short:
                if operation.request.operation == "resume":
                    self.ask_for_memory(short.needed_bytes)
                if clock.monotonic() >= deadline:
                    raise
                device, needed_bytes = short.device, short.needed_bytes
            finally:
                self._moving.release()
            with log.phase(Phase.WAIT_FOR_MEMORY):
                operation.move_later()
                self._wait_for_memory(device, needed_bytes, deadline, operation)

    def _bring_back(self, request: Resume, operation: Operation, log: PhaseLog) -> OperationReport:
        """Resume the memory; with a smaller KV cache if the whole one finds no room, and if that was asked for."""
        try:
            work = partial(self._map, request, operation, log)
            return self.with_room(operation, log, request.wait_for_memory_s, work)
        except errors.OutOfDeviceMemoryError:
            if request.kv_cache == "whole":
                raise
            operation.move_later()
            return self.with_room(operation, log, 0.0, partial(self._map_smaller, request, operation, log))

    def _map_smaller(self, request: Resume, operation: Operation, log: PhaseLog) -> OperationReport:
        """Resume all else, and then as much of the KV cache as fits. If that fails, what came back stays."""
        assert self.fit_cache is not None
        self.check(request)
        operation.await_commit()
        asked = {tag for tag in released_tags(self.memory.status()) if request.concerns(tag)}
        others = request.model_copy(update={"tags": tuple(sorted(asked - {*ResizeKvCache.tags}))})
        moved = [tag for tag in self.memory.resume(others, log=log).tags if not tag.already] if others.tags else []
        report = self.fit_cache(lambda: self.memory.resume(request, log=log))
        tags = {tag.tag: tag for tag in (*report.tags, *moved)}
        resumed = sum(tag.resumed_bytes for tag in tags.values())
        return operation.moved(report.model_copy(update={"tags": tuple(tags.values()), "resumed_bytes": resumed}))

    def _map(self, request: Resume, operation: Operation, log: PhaseLog) -> OperationReport:
        """Resume the memory; if that is to be prepared, on device memory that is reserved before."""
        self.check(request)  # not earlier: an update may have written the demanded version meanwhile
        if operation.blocks_others:
            with log.phase(Phase.RESERVE):
                self.memory.reserve(request)
        try:
            operation.await_commit()
            return operation.moved(self.memory.resume(request, log=log))
        except BaseException:
            if request.prepare:
                self.memory.give_back_reserved()
            raise

    def _wait_for_memory(self, index: int, needed_bytes: int, deadline: float, operation: Operation) -> None:
        """Return once the device has that much free, or at the deadline. Polls: other processes signal no release."""
        while clock.monotonic() < deadline:
            time.sleep(max(0.0, min(MEMORY_POLL_S, deadline - clock.monotonic())))
            operation.check()
            if any(each.unused_bytes >= needed_bytes for each in self.memory.read_devices() if each.index == index):
                return

    def pause(self, mode: DrainMode, timeout_s: float, *, asleep: bool = False) -> None:
        """Stop generating until ``continue_generation``; memory stays resident. Returns after the drain. ``asleep``:
        report the pause as ``is_sleeping``. Raises DrainTimeoutError if requests still run after ``timeout_s``:
        generation is then as before. Raises PauseEndedError if generation was continued meanwhile."""
        with self._admission.pausing(asleep=asleep):
            self._engine.drain(timeout_s, mode)

    def continue_generation(self) -> str:
        """Undo ``pause``, at once or when all memory is back; return why admission is still closed, or nothing."""
        return self._admission.unpause()

    @contextmanager
    def writing(
        self,
        version: str | None = None,
        refusals: tuple[type[Exception], ...] = (),
        asleep: bool | None = None,
        path: str | None = None,
    ) -> Iterator[None]:
        """Run the block, which writes the weights in place. Waits until no memory is moved.

        If the weights are released, and the block can write host memory (``asleep``; by default what the engine says
        of its updates), the block finds the tensors there, and the next resume brings in what was written. If the block
        then raises, content and version are as before. If the block loads all weights from ``path``, engines that share
        a store and update to the same version load them once: see ``memsaver_core.updates``.

        Afterwards the weights have this ``version``, and what a release had discarded counts as written, unless the
        block raised or the engine says that weights are still missing. They have no version while the block writes in
        place, nor if it raises then, except one of the ``refusals``, which mean that nothing was written.

        Raises, without running the block, NotResidentError if the weights are released and cannot be written in host
        memory, OutOfHostMemoryError if there is too little, MemoryBusyError if an operation stalls or another block
        runs."""
        while not self._moving.acquire(timeout=self._phase_timeout_s):
            if self._updating:
                raise self._update_too_long("nothing was written")
            operation = self.operations.running
            if operation is not None and (stall := operation.stall()) is not None:
                raise errors.MemoryBusyError(f"nothing was written: {operation.stall_message(stall)}", stall.phase)
        try:
            if asleep is None:
                asleep = getattr(self._engine, "updates_asleep", False)
            asleep = asleep and "weights" in released_tags(self.memory.status())
            if not asleep:
                self.check_resident(["weights"])
            self._updating = True
            source = source_of(path, version) if asleep and path is not None else None
            with self.memory.written_asleep("weights", source) if asleep else self._written_in_place(refusals):
                yield
            self._verification.content_changed()
            missing = unwritten_weights(self._engine)
            self.weights_version = None if missing else version
            if not missing:
                self._admission.written(["weights"])
        finally:
            self._updating = False
            self._moving.release()

    @contextmanager
    def _written_in_place(self, refusals: tuple[type[Exception], ...]) -> Iterator[None]:
        before = self.weights_version
        self._verification.content_changed()
        self.weights_version = None
        try:
            yield
        except refusals:
            self.weights_version = before
            raise

    def content_written(self, tags: Sequence[str], version: str | None = None) -> str:
        """Note that the caller has written the content of ``tags`` (none: all that is lost); return why admission is
        still closed, or nothing. With a ``version`` the weights are among them, and may be released with a backup that
        the engine's own update has written. Raises UnknownTagError, NotResidentError if another tag is released, or
        MemoryBusyError while an update writes."""
        self.memory.check_tags(tags)
        lost = self.snapshot().unwritten
        named = set() if version is None else {"weights"}
        written = {*(tags or lost), *named}
        self.check_resident(written - (named - lost))
        if self._updating:
            raise errors.MemoryBusyError(
                "an update is writing weights at this moment; nothing was noted. Repeat the call when it is done",
                Phase.WAIT_FOR_WEIGHTS.value,
            )
        self._verification.content_changed()
        if "weights" in written:
            self.weights_version = version
        return self._admission.written(written)

    def weights_updating(self) -> None:
        """Note that the engine's own update of the weights begins, which may fail half way. Never blocks."""
        self.weights_version = None

    def weights_updated(self) -> None:
        """Note that the engine's own update of the weights was seen. Never blocks; may be called by the engine."""
        self._verification.content_changed()
        self.weights_version = None
        if "weights" not in released_tags(self.memory.status()):
            self._admission.written(["weights"])

    def snapshot(self) -> Snapshot:
        """Return the state now, read while no operation began or ended."""
        running = self.operations.running
        while True:
            now = self._snapshot(running)
            running, before = self.operations.running, running
            if running is before:
                return now

    def _snapshot(self, running: Operation | None) -> Snapshot:
        # Reads the core once, because each read may have to wait for the interpreter's lock.
        status = self.memory.status()
        state = status.state
        if state != "failed" and running is not None and running.is_running:
            state = {"release": "releasing", "resume": "resuming"}.get(running.request.operation, state)
        admission = self._admission
        unwritten = admission.unwritten(status)
        return Snapshot(status, state, admission.closed_reason(status), running, unwritten, self._updating)

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is released, or generation was put to sleep without a release."""
        status = self.memory.status()
        return bool(released_tags(status)) or status.hibernated or self._admission.asleep

    def _check_usable(self) -> None:
        status = self.memory.status()
        if status.state == "failed":
            raise errors.EngineFailedError(failed_for_good(status))

    def check(self, request: Release | Resume) -> None:
        """Raise VerificationUnavailableError, WrongWeightsError, UnsupportedError or BadRequestError if ``request``
        asks for what this engine does not have."""
        self._verification.check(request)
        if request.dp_ranks:
            self._check_part(request)
        if isinstance(request, Release) or request.weights_version is None:
            return
        held = self.weights_version
        if request.weights_version != held:
            named = f"are of version {held!r}" if held else "have no version: their content was written without one"
            raise errors.WrongWeightsError(
                f"the resume demands weights of version {request.weights_version!r}, but they {named}; nothing was "
                "resumed. Resume without weights_version, and update the weights"
            )

    def _check_part(self, request: Release | Resume) -> None:
        nothing = f"nothing was {request.operation}d"
        if not isinstance(self._engine, DataParallelEngine):
            raise errors.UnsupportedError(
                f"engine {self._engine.name!r} has no data-parallel engines that can be {request.operation}d alone: "
                f"leave out dp_ranks; {nothing}"
            )
        self._engine.check_dp_ranks(request.dp_ranks)
        status = self.status_of(request)
        if status.hibernated:
            raise errors.UnsupportedError(f"the server is hibernated: resume it without dp_ranks; {nothing}")
        if not isinstance(request, Release):
            return
        for tag in status.tags:
            if request.concerns(tag.tag) and not keeps_content(tag, request) and needs_writing(tag, request):
                raise errors.UnsupportedError(
                    f"the content of {tag.tag} would have to be written again, and an update writes that of all "
                    f"engines: keep it, or leave out dp_ranks; {nothing}"
                )

    def check_resident(self, tags: Iterable[str]) -> None:
        """Raise NotResidentError if one of the tags is released."""
        status = self.memory.status()
        for tag in tags:
            if status.hibernated or tag in released_tags(status):
                raise errors.NotResidentError.of(tag)

    def _take(self, deadline: float, given_up: Callable[[], bool]) -> bool:
        """Take the memory lock before ``deadline``, a time of ``clock``, and ``given_up()``; return whether it did."""
        return any(self._moving.acquire(timeout=wait_s) for wait_s in waits(deadline, given_up))

    def _take_between_updates(self, operation: Operation, log: PhaseLog) -> None:
        """Take the memory lock; raise MemoryBusyError if a weight update takes too long, or OperationCancelledError."""
        if self._moving.acquire(blocking=False):
            return
        with log.phase(Phase.WAIT_FOR_WEIGHTS):
            if not self._take(clock.monotonic() + self._phase_timeout_s, lambda: operation.cancelled_by is not None):
                operation.check()
                raise self._update_too_long(f"nothing was {operation.request.operation}d")

    def _update_too_long(self, consequence: str) -> errors.MemoryBusyError:
        return errors.MemoryBusyError(
            f"a weight update has not ended after {self._phase_timeout_s:g} s; {consequence}. Repeat the call "
            "when it is done",
            Phase.WAIT_FOR_WEIGHTS.value,
        )

    def _note_released(self, request: Release, asked: Release, before: tuple[TagStatus, ...]) -> None:
        """Note which tags were released and which lost content, by the core's status: a release may fail half way."""
        tags = self.status_of(request).tags
        released = [tag for tag in tags if tag.released_bytes and asked.concerns(tag.tag)]
        undone = self.memory.take_lost() if isinstance(self.memory, WatchedMemory) else set()
        lost = lost_tags(before, released, request) | undone
        unwritten = [tag.tag for tag in tags if tag.tag in lost and needs_writing(tag, request)]
        self._admission.content_lost(lost, unwritten)
        if unwritten:
            self._verification.content_changed()
        if "weights" in unwritten:
            self.weights_version = None  # also if the engine makes them again
        if request.tags:
            self._implicit -= set(request.tags)
        else:
            self._implicit |= {tag.tag for tag in released}
        if undone:
            self._admission.resumed(undone)
            try:
                self._admission.repair()
            except Exception:
                logger.exception("what a failed release has lost cannot be repaired; a resume tries again")

    def _note_resumed(self, request: Resume, released: set[str]) -> None:
        resumed = released - released_tags(self.status_of(request))
        self._admission.resumed(resumed)
        self._implicit -= resumed


def _gives_up_cache(request: Release, tags: Iterable[TagStatus]) -> bool:
    """Whether the release takes the KV cache, and its content is not kept."""
    cache = [tag for tag in tags if tag.tag in ResizeKvCache.tags and request.concerns(tag.tag)]
    return any(tag.resident_bytes and not keeps_any(request.restore.get(tag.tag, tag.restore)) for tag in cache)
