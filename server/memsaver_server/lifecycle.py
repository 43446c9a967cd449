"""The state machine of the engine's memory, behind every dialect.

Release: check tags -> close admission -> drain -> release the memory (synchronize, pause, empty_cache, ipc_collect,
settle; optionally hibernate) -> report.
Resume: check tags -> resume the memory (wake, restore) -> repair -> verify if asked -> reopen admission if nothing is
released -> report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from memsaver_core import PhaseLog
from memsaver_core.errors import MemsaverError, OutOfDeviceMemoryError, UnsupportedError
from memsaver_core.options import ReleaseOptions, ResumeOptions
from memsaver_core.reports import OperationReport, Status, TagStatus
from memsaver_server.admission import Admission, failed_for_good
from memsaver_server.device_room import reserved, wait_for_memory
from memsaver_server.drain import drain
from memsaver_server.engine import DrainMode, Engine, WatchedMemory, memory_of, unwritten_weights
from memsaver_server.memory_lock import MemoryLock
from memsaver_server.operation import Operation, ReleaseRequest, ResumeRequest
from memsaver_server.operation_queue import OperationQueue
from memsaver_server.settings import Settings
from memsaver_server.tag_selection import ImplicitTags, lost_tags, needs_writing, options_for, released_tags
from memsaver_server.verification import Verification

logger = logging.getLogger("memsaver")


class EngineFailedError(MemsaverError):
    """The device context or a rank is lost: no operation can succeed any more."""

    kind = "context_lost"


class NotResidentError(MemsaverError):
    """The call needs memory that is released. Nothing was done."""

    kind = "not_resident"
    status = 409

    def __init__(self, tag: str) -> None:
        super().__init__(f"the memory of {tag!r} is released; resume it first")


@dataclass(frozen=True)
class Snapshot:
    """The process at one moment.

    Attributes:
        status: the core's account.
        state: ``resident``, ``releasing``, ``released``, ``resuming`` or ``failed``.
        closed_reason: why the engine accepts no requests, or an empty string if it does.
        running: the operation in progress, or None.
        unwritten: the tags whose content is lost until it is written again.
    """

    status: Status
    state: str
    closed_reason: str
    running: Operation | None
    unwritten: frozenset[str]


class Lifecycle:
    """Releases and resumes an engine's memory. Every method may be called from any thread.

    ``release`` and ``resume`` return at once with the operation; others block if they say so.
    """

    def __init__(self, engine: Engine, settings: Settings, on_finished: Callable[[Operation], None]) -> None:
        self._engine = engine
        #: The engine's memory: of this process, or of the ranks that the engine reaches.
        self.memory = memory_of(engine)
        self.operations = OperationQueue(settings.history, on_finished, self.memory, settings.phase_timeout_s)
        self._admission = Admission(engine, self.memory, settings)
        if isinstance(self.memory, WatchedMemory):
            self.memory.on_failure(self._admission.reopen)  # which closes it for good
        self._lock = MemoryLock(settings.phase_timeout_s)
        self._implicit = ImplicitTags()
        self._verification = Verification(engine, self._admission, self.memory, settings)

    def release(
        self, request: ReleaseRequest, *, wait: bool = False, key: str | None = None, client: str = ""
    ) -> Operation:
        """Return the memory of the tags to the driver, after the requests in flight are drained.

        A tag that is released already is success. After a failure admission is as before, unless memory is released.

        With ``request.prepare`` it stops before memory is moved, until ``operations.commit`` or the end of its lease.

        Raises:
            UnknownTagError: a tag does not exist. Nothing was started.
            UnsupportedError: the process cannot be hibernated. Nothing was started.
            VerificationUnavailableError: it cannot be verified. Nothing was started.
            ConflictError, IdempotencyKeyError, NoThreadError, TooManyOperationsError: see OperationQueue.submit.
        """
        self.memory.check_tags(request.tags)
        self.memory.check_tags(tuple(request.options.restore))
        if request.options.hibernate and self.memory.enabled() and (reasons := self.memory.hibernation_obstacles()):
            raise UnsupportedError("the engine cannot be hibernated: " + "; ".join(reasons) + "; nothing was released")
        self._verification.check_release(asked=request.verify)
        return self.operations.submit(request, partial(self._release, request), wait=wait, key=key, client=client)

    def _release(self, request: ReleaseRequest, operation: Operation, log: PhaseLog) -> OperationReport:
        if not self.memory.enabled():
            operation.hold()
            return self.memory.release(request.options, log=log)
        self._check_usable()
        before = self.memory.status().tags
        options = options_for(request, before)
        self._admission.close_for("memory is being released")
        try:
            with ExitStack() as until_released:
                with log.phase("drain"):
                    drain(self._engine, self._lock, operation, until_released)
                    if not request.prepare:
                        operation.cancellation.begin_moving()
                self._verification.before_release(log, asked=request.verify)
                if request.prepare:
                    with log.phase("check"):
                        self.memory.check_release(options)
                    operation.hold()
                try:
                    return self.memory.release(options, log=log)
                finally:
                    self._note_released(request, options, before)
        finally:
            self._admission.reopen()

    def resume(
        self, request: ResumeRequest, *, wait: bool = False, key: str | None = None, client: str = ""
    ) -> Operation:
        """Bring the memory of the tags back, and reopen admission once nothing is released.

        A tag that is resident already is success. After a failure all is still released and the call can be repeated.

        Raises:
            As release.
        """
        self.memory.check_tags(request.tags)
        return self.operations.submit(request, partial(self._resume, request), wait=wait, key=key, client=client)

    def _resume(self, request: ResumeRequest, operation: Operation, log: PhaseLog) -> OperationReport:
        if not self.memory.enabled():
            operation.hold()
            return self.memory.resume(request.options, log=log)
        self._check_usable()
        self._verification.check_resume(asked=request.verify)
        status = self.memory.status()
        released = released_tags(status)
        options = replace(request.options, tags=self.tags_to_resume(request.tags))
        if released or self._admission.needs_repair() or status.hibernated:
            self._admission.close_for("memory is being resumed")
        try:
            report = self._restore(options, request, operation, log)
            self._note_resumed(released)
            with log.phase("repair"):
                self._admission.repair()
        except BaseException:
            self._note_resumed(released)
            self._admission.reopen()
            raise
        try:
            self._verification.after_resume(log, asked=request.verify, resumed=bool(released) or status.hibernated)
        finally:
            with log.phase("reopen"):
                self._admission.reopen()
        return replace(report, phases=log.phases)

    def tags_to_resume(self, requested: tuple[str, ...]) -> tuple[str, ...]:
        """Return the tags that a resume of the ``requested`` ones brings back; none means all that are released."""
        return self._implicit.complete(requested, released_tags(self.memory.status()))

    def _restore(
        self, options: ResumeOptions, request: ResumeRequest, operation: Operation, log: PhaseLog
    ) -> OperationReport:
        deadline = time.monotonic() + request.wait_for_memory_s
        while True:
            try:
                with self._lock.for_resume(log, operation.cancellation), reserved(self.memory, options, operation, log):
                    operation.hold()
                    return self.memory.resume(options, log=log)
            except OutOfDeviceMemoryError as short:
                if time.monotonic() >= deadline:
                    raise
                with log.phase("wait_for_memory"):
                    operation.cancellation.move_later()
                    wait_for_memory(self.memory, short, deadline, operation.cancellation)

    def pause(self, mode: DrainMode, timeout_s: float, *, asleep: bool = False) -> None:
        """Stop generating until ``continue_generation``; memory stays resident. Blocks for the drain.

        Args:
            asleep: report the pause as ``is_sleeping``.

        Raises:
            DrainTimeoutError: requests still run. Generation is as before.
            PauseEndedError: generation was continued meanwhile.
        """
        with self._admission.pausing(asleep=asleep):
            self._engine.drain(timeout_s, mode)

    def continue_generation(self) -> str:
        """Undo ``pause``; while memory is released this is remembered, and admission opens when it is back.

        Returns:
            Why admission is still closed, or an empty string.
        """
        return self._admission.unpause()

    @contextmanager
    def writing(self, tag: str = "weights") -> Iterator[None]:
        """Have the block write the content of ``tag`` in place; no release or resume overlaps it. Blocks.

        Content that a release had discarded counts as written afterwards, unless the block raised, or the engine says
        that weights are still missing.

        Raises:
            NotResidentError: the tag is released. The block was not run.
            MemoryBusyError: an operation stalls, or another update has not ended. The block was not run.
        """
        with self._lock.for_update(lambda: self.operations.running):
            self._check_resident([tag])
            yield
            self._verification.content_changed()
            if tag != "weights" or not unwritten_weights(self._engine):
                self._admission.written([tag])

    def content_written(self, tags: Sequence[str]) -> str:
        """Take the caller's word that the content of ``tags`` (none: all that is lost) was written.

        Returns:
            Why admission is still closed, or an empty string.

        Raises:
            UnknownTagError: a tag does not exist.
            NotResidentError: a tag is released.
        """
        self.memory.check_tags(tags)
        written = list(tags) or self.snapshot().unwritten
        self._check_resident(written)
        self._verification.content_changed()
        return self._admission.written(written)

    def weights_updated(self) -> None:
        """Note that the engine's own update of the weights was seen. Never blocks; may be called by the engine."""
        if "weights" not in released_tags(self.memory.status()):
            self._verification.content_changed()
            self._admission.written(["weights"])

    def _check_resident(self, tags: Iterable[str]) -> None:
        status = self.memory.status()
        for tag in tags:
            if status.hibernated or tag in released_tags(status):
                raise NotResidentError(tag)

    def snapshot(self) -> Snapshot:
        """Return the state now. Reads the core once, because each read may have to wait for the interpreter's lock."""
        status = self.memory.status()
        running = self.operations.running
        state = status.state
        if state != "failed" and running is not None and running.is_running:
            state = "releasing" if running.request.operation == "release" else "resuming"
        admission = self._admission
        return Snapshot(status, state, admission.closed_reason(status), running, admission.unwritten(status))

    @property
    def state(self) -> str:
        """See ``Snapshot.state``."""
        return self.snapshot().state

    @property
    def is_sleeping(self) -> bool:
        """Whether memory is released, or generation was put to sleep without a release."""
        status = self.memory.status()
        return bool(released_tags(status)) or status.hibernated or self._admission.asleep

    def raise_if_rank_lost(self) -> None:
        """Raise EngineFailedError if the engine's ranks have failed."""
        if isinstance(self.memory, WatchedMemory):
            self._check_usable()

    def _check_usable(self) -> None:
        status = self.memory.status()
        if status.state == "failed":
            raise EngineFailedError(failed_for_good(status))

    def _note_released(self, request: ReleaseRequest, options: ReleaseOptions, before: tuple[TagStatus, ...]) -> None:
        """Note what was released and what lost its content. Asks the core, because a release may fail half way."""
        tags = self.memory.status().tags
        released = [tag for tag in tags if tag.released_bytes and (not options.tags or tag.tag in options.tags)]
        undone = self.memory.take_lost() if isinstance(self.memory, WatchedMemory) else set()
        lost = lost_tags(before, released, request.options) | undone
        unwritten = [tag.tag for tag in tags if tag.tag in lost and needs_writing(tag, request.options)]
        self._admission.content_lost(lost, unwritten)
        if unwritten:
            self._verification.content_changed()
        self._implicit.released(request.tags, [tag.tag for tag in released])
        if undone:
            self._admission.resumed(undone)
            try:
                self._admission.repair()
            except Exception:
                logger.exception("what a failed release has lost cannot be repaired; a resume tries again")

    def _note_resumed(self, released: set[str]) -> None:
        resumed = released - released_tags(self.memory.status())
        self._admission.resumed(resumed)
        self._implicit.resumed(resumed)
