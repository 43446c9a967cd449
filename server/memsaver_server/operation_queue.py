"""Operations as objects: one runs at a time, in the order in which they came; a repeat joins the one in flight.

They run in a worker thread, not in their callers', so a client that goes away cancels nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from memsaver_core import PhaseLog
from memsaver_core.reports import OperationReport, PhaseReport
from memsaver_server.engine import LOCAL_MEMORY, DrainMode, Memory
from memsaver_server.heap_reserve import headroom

logger = logging.getLogger("memsaver")

#: More callers than this waiting for their turn are sent away.
MAX_PENDING = 128
#: How long the worker thread stays when there is nothing to do, seconds. Starting one for each operation costs more
#: than an operation on little memory does.
IDLE_S = 30.0


@dataclass(frozen=True)
class ReleaseRequest:
    """What a caller asks of a release. Two equal requests are one operation while it is in flight.

    Attributes:
        tags: sorted names, or None for all.
        timeout_s: how long requests in flight may take to end.
        mode: what the drain does to them.
        restore: policies that hold for this release alone, as sorted (tag, policy) pairs.
        at_least_bytes: release only as many tags as give this back, the cheapest first; None releases all of them.
        trim: also give back what libraries keep for speed; None does so before hibernating.
        hibernate: last of all, give back the CUDA context.
    """

    tags: tuple[str, ...] | None = None
    timeout_s: float = 25.0
    mode: DrainMode = "wait"
    restore: tuple[tuple[str, str], ...] = ()
    at_least_bytes: int | None = None
    trim: bool | None = None
    hibernate: bool = False
    operation: Literal["release"] = "release"


@dataclass(frozen=True)
class ResumeRequest:
    """What a caller asks of a resume.

    Attributes:
        tags: sorted names, or None for all that is released.
        wait_for_memory_s: how long to wait for a co-tenant to let go of device memory.
    """

    tags: tuple[str, ...] | None = None
    wait_for_memory_s: float = 0.0
    operation: Literal["resume"] = "resume"


OperationRequest = ReleaseRequest | ResumeRequest
Status = Literal["queued", "running", "succeeded", "failed"]


class ConflictError(Exception):
    """An operation that would undo what is asked for is in progress.

    Attributes:
        running: the operation in the way.
    """

    def __init__(self, request: OperationRequest, running: Operation) -> None:
        self.running = running
        super().__init__(
            f"cannot {request.operation} {tag_list(request.tags)}: {running.request.operation} {running.id} of "
            f'{tag_list(running.request.tags)} is in progress. Try again when it is done, or send "wait": true'
        )


class TooManyOperationsError(Exception):
    """So many operations wait for their turn that no more are taken."""

    def __init__(self) -> None:
        super().__init__(f"{MAX_PENDING} operations wait for their turn already; try again later")


class IdempotencyKeyError(Exception):
    """An Idempotency-Key was used before, for another request."""

    def __init__(self, key: str, first: Operation) -> None:
        super().__init__(
            f"Idempotency-Key {key!r} belongs to {first.request.operation} {first.id}, which asked for something else; "
            "use a new key for a new request"
        )


class ServerEndsError(Exception):
    """The server ends before the operation has. The operation goes on for as long as the process lives."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(
            f"the server ends, and {operation.request.operation} {operation.id} has not: it is in phase "
            f"'{operation.phase}', and goes on for as long as the process lives"
        )


class PhaseTimeoutError(Exception):
    """A phase has made no progress for too long. The operation goes on; nobody waits for it any more.

    Attributes:
        operation: the one that is stuck.
        phase: the phase that it is in.
    """

    def __init__(self, operation: Operation, stall: Stall) -> None:
        self.operation = operation
        self.phase = stall.phase
        super().__init__(stall_message(operation, stall))


@dataclass(frozen=True)
class Stall:
    """A phase that has made no progress for longer than it may, and for how long."""

    phase: str
    seconds: float


def stall_message(operation: Operation, stall: Stall) -> str:
    """Return what callers and the log are told of an operation that is stuck."""
    return (
        f"{operation.request.operation} {operation.id} has made no progress in phase {stall.phase!r} for "
        f"{stall.seconds:.0f} s. It goes on; GET /operations/{operation.id} tells what becomes of it"
    )


def tag_list(tags: Sequence[str] | None) -> str:
    """Return ``tags`` as a message names them."""
    return "all tags" if tags is None else ", ".join(tags) or "no tags"


@dataclass
class Operation:
    """One release or resume, from the moment it was asked for. Its fields are written by its worker thread alone.

    Attributes:
        client: who asked first.
        memory: what it works on.
        phase_timeout_s: how long a phase may go without progress until that counts as a stall.
        report: what it did, where it succeeded.
        error: why it failed, where it did.
        failed_phase: and in which phase; an empty string where in none.
        state: the process's state when it ended.
        done: set when it has ended, either way.
    """

    id: str
    request: OperationRequest
    client: str
    created_at: float
    memory: Memory = LOCAL_MEMORY
    phase_timeout_s: float = math.inf
    status: Status = "queued"
    started_at: float | None = None
    finished_at: float | None = None
    seconds: float = 0.0
    log: PhaseLog | None = None
    report: OperationReport | None = None
    error: BaseException | None = None
    failed_phase: str = ""
    state: str = ""
    done: Future[None] = field(default_factory=Future)
    _started: float = 0.0
    _moved: float = field(default_factory=time.monotonic)
    _seen: tuple[str, int, int] = ("", 0, 0)

    def __post_init__(self) -> None:
        # A waiter that is cancelled (its client went away) must not cancel what the others wait for.
        self.done.set_running_or_notify_cancel()

    @property
    def phase(self) -> str:
        """What it does now, or an empty string."""
        return self.log.now if self.log is not None and self.status == "running" else ""

    @property
    def phase_starts(self) -> tuple[float, ...]:
        """When each of its phases began, in their order; the last may run still."""
        return self.log.starts if self.log is not None else ()

    @property
    def phases(self) -> tuple[PhaseReport, ...]:
        """The phases that have ended so far."""
        if self.report is not None:
            return self.report.phases
        return self.log.phases if self.log is not None else ()

    def seconds_so_far(self) -> float:
        """How long it has run, or ran."""
        if self.status == "running":
            return time.monotonic() - self._started
        return self.seconds

    def stall(self) -> Stall | None:
        """What it is stuck in, if it is. Progress is what differs from the last call, so somebody has to ask often."""
        if self.status != "running":
            return None
        phase, now = self.phase, time.monotonic()
        seen = (phase, len(self.phase_starts), self.memory.status().progress.done_bytes)
        if seen != self._seen:
            self._seen, self._moved = seen, now
        still = now - self._moved
        return Stall(phase or "start", still) if still > self.phase_timeout_s + self._patience(phase) else None

    def _patience(self, phase: str) -> float:
        """How long the caller asked this phase to wait, seconds."""
        if isinstance(self.request, ReleaseRequest):
            return self.request.timeout_s if phase == "drain" else 0.0
        return self.request.wait_for_memory_s if phase == "wait_for_memory" else 0.0

    async def watch(self, every_s: float) -> None:
        """Return when it has ended; until then, log each phase that it is stuck in, once."""
        told = ""
        ended = self.ending()
        while not ended.done():
            await asyncio.wait({ended}, timeout=every_s)
            stall = self.stall()
            if stall is not None and stall.phase != told:
                told = stall.phase
                logger.warning("%s", stall_message(self, stall))

    def ending(self) -> asyncio.Future[None]:
        """Return a future of the running event loop that is done once this operation is.

        ``asyncio.wrap_future`` leaves futures that refer to each other, and stay until Python looks for such.
        """
        loop = asyncio.get_running_loop()
        ending = loop.create_future()

        def settle() -> None:
            if not ending.done():
                ending.set_result(None)

        def tell(_done: Future[None]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle)

        self.done.add_done_callback(tell)
        return ending

    def _start(self) -> None:
        self.status = "running"
        self.started_at = time.time()
        self._started = self._moved = time.monotonic()
        self.log = PhaseLog(self.memory.read_devices)

    def _finish(self, report: OperationReport | None, error: BaseException | None) -> None:
        self.seconds = time.monotonic() - self._started
        self.finished_at = time.time()
        self.report = None if report is None else replace(report, seconds=self.seconds)
        # The frames of a failure shall not keep this operation for longer than the history does.
        self.error = None if error is None else error.with_traceback(None)
        if error is not None and self.log is not None:
            self.failed_phase = self.log.failed
        self.state = self.memory.status().state
        self.status = "succeeded" if error is None else "failed"


class Operations:
    """The queue of operations and what is remembered of them."""

    def __init__(
        self,
        history: int,
        on_finished: Callable[[Operation], None],
        memory: Memory = LOCAL_MEMORY,
        phase_timeout_s: float = math.inf,
    ) -> None:
        self._memory = memory
        self._phase_timeout_s = phase_timeout_s
        self._history: OrderedDict[str, Operation] = OrderedDict()
        self._history_limit = history
        self._keys: OrderedDict[str, Operation] = OrderedDict()
        self._pending: deque[tuple[Operation, Callable[[Operation], OperationReport]]] = deque()
        self._turn = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._on_finished = on_finished

    @property
    def running(self) -> Operation | None:
        """The operation in work now."""
        with self._turn:
            return self._pending[0][0] if self._pending else None

    def get(self, operation_id: str) -> Operation | None:
        with self._turn:
            return self._history.get(operation_id)

    def recent(self) -> list[Operation]:
        """All that are remembered, the newest first."""
        with self._turn:
            return list(reversed(self._history.values()))

    def submit(
        self,
        request: OperationRequest,
        work: Callable[[Operation], OperationReport],
        *,
        wait: bool,
        key: str | None,
        client: str,
    ) -> Operation:
        """Start ``work`` in its turn, or return the operation in flight that ``request`` repeats.

        Args:
            wait: queue behind a conflicting operation instead of refusing.
            key: the caller's Idempotency-Key: a repeat under the same key is answered by the first one's result,
                however long ago that was, unless it failed.

        Raises:
            ConflictError, IdempotencyKeyError, TooManyOperationsError: nothing was started.
        """
        with self._turn:
            repeated = self._repeated(request, key)
            if repeated is not None:
                return repeated
            conflicting = next((other for other, _ in self._pending if _conflict(request, other.request)), None)
            if conflicting is not None and not wait:
                raise ConflictError(request, conflicting)
            if len(self._pending) >= MAX_PENDING:
                raise TooManyOperationsError
            operation = Operation(
                uuid.uuid4().hex[:12], request, client, time.time(), self._memory, self._phase_timeout_s
            )
            self._pending.append((operation, work))
            self._remember(operation, key)
            if self._worker is None:
                self._worker = threading.Thread(target=self._run, name="memsaver-operations", daemon=True)
                self._worker.start()
            else:
                self._turn.notify()
        return operation

    def close(self) -> None:
        """Let the worker end as soon as nothing is to be done: it would keep the engine from being forgotten."""
        with self._turn:
            self._closed = True
            self._turn.notify()

    def _repeated(self, request: OperationRequest, key: str | None) -> Operation | None:
        first = self._keys.get(key) if key is not None else None
        if key is not None and first is not None:
            if first.request != request:
                raise IdempotencyKeyError(key, first)
            if first.status != "failed":
                return first
        # The latest equal one: what it leaves behind is what its callers find.
        return next((other for other, _ in reversed(self._pending) if other.request == request), None)

    def _remember(self, operation: Operation, key: str | None) -> None:
        self._history[operation.id] = operation
        if key is not None:
            self._keys[key] = operation
        self._forget()

    def _forget(self) -> None:
        """Keep the last finished operations, and those that are not done."""
        for memory in (self._history, self._keys):
            while len(memory) > self._history_limit + len(self._pending):
                memory.popitem(last=False)

    @headroom()
    def _run(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._pending or self._closed, IDLE_S)
                if not self._pending:
                    self._worker = None
                    return
                operation, work = self._pending[0]
            self._work(operation, work)
            del operation, work

    def _work(self, operation: Operation, work: Callable[[Operation], OperationReport]) -> None:
        report: OperationReport | None = None
        error: BaseException | None = None
        try:
            operation._start()  # reads the devices, which may fail like anything after it
            report = work(operation)
        except BaseException as raised:
            error = raised
        operation._finish(report, error)
        self._on_finished(operation)
        # Out of the way before its callers hear of it: their next call must not conflict with it.
        with self._turn:
            self._pending.popleft()
            self._forget()
        operation.done.set_result(None)


def _conflict(one: OperationRequest, other: OperationRequest) -> bool:
    if one.operation == other.operation:
        return False
    return one.tags is None or other.tags is None or not set(one.tags).isdisjoint(other.tags)
