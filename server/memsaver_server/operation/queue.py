"""The queue of operations: one runs at a time, in order of arrival; a repeat joins the one in flight.

A worker thread runs them, so a client that disconnects cancels nothing. ``cancel`` does, before memory is moved.
"""

from __future__ import annotations

import logging
import math
import threading
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from memsaver_core.contract.errors import OR_WAIT, TooLateToCancelError, TooManyOperationsError
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import Asked
from memsaver_core.phases import PhaseLog
from memsaver_server.operation.history import History, Keys
from memsaver_server.operation.operation import BALANCER, Moved, Operation, tag_list
from memsaver_server.operation.table import ENGINE
from memsaver_server.threads import reserved_heap, start_thread

logger = logging.getLogger("memsaver")

#: Operations that may wait or run; more are refused.
MAX_PENDING = 128
#: Idle time after which the worker thread ends, seconds. Starting one may take longer than an operation.
IDLE_S = 30.0

Work = Callable[[Operation, PhaseLog], OperationReport]


class OperationQueue:
    """Runs operations and remembers the last ``history`` of them. Every method may be called from any thread."""

    def __init__(
        self, history: int, on_finished: Callable[[Operation], None], memory: Moved, phase_timeout_s: float = math.inf
    ) -> None:
        self._memory = memory
        self._phase_timeout_s = phase_timeout_s
        self._keys = Keys()
        self._history: History[Operation] = History(history, self._keys.forgotten)
        self._pending: deque[tuple[Operation, Work]] = deque()
        #: The lock of the queue and of its operations.
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._on_finished = on_finished
        #: Returns the version of the weights, which an operation's answer reports.
        self.weights_version: Callable[[], str | None] = lambda: None

    @property
    def running(self) -> Operation | None:
        with self._changed:
            return self._pending[0][0] if self._pending else None

    def find(self, operation_id: str) -> Operation:
        with self._changed:
            return self._history.find(operation_id)

    def recent(self) -> list[Operation]:
        with self._changed:
            return self._history.recent()

    def submit(self, request: Asked, work: Work, *, key: str | None, client: str) -> Operation:
        """Enqueue ``work``, or return the operation in flight that ``request`` repeats.

        A call joins an operation only if nothing queued behind that would undo it. Only its owner joins one that is to
        be prepared; each repeat renews the lease. A repeat under the same Idempotency-Key ``key`` gets the operation
        that its first call got, see ``Keys``, unless that failed, or was prepared and given up. Nothing was started if
        this raises ConflictError, IdempotencyKeyError, NoThreadError or TooManyOperationsError.
        """
        with self._changed:
            operation = self._keys.find(request, key)
            if operation is not None:
                operation.renew(request)
            else:
                operation = self._join_equal(request, key, client) or self._enqueue(request, work, key, client)
                self._keys.add(key, request, operation)
            ended = self._drop_ended()
        self._conclude(*ended)
        return operation

    def cancel(self, operation: Operation, by: str) -> None:
        """See ``Operation.cancel``; also notify its callers if it has ended."""
        with self._changed:
            operation.cancel(by)
            ended = self._drop_ended()
        self._conclude(*ended)

    def close(self) -> None:
        """Cancel what is prepared, and let the worker, which refers to the engine, end once the queue is empty."""
        with self._changed:
            self._closed = True
            prepared = [operation for operation, _ in self._pending if operation.blocks_others]
            self._changed.notify()
        for operation in prepared:
            with suppress(TooLateToCancelError):  # it was committed meanwhile
                self.cancel(operation, "the end of the service")

    # With the lock held.

    def _drop_ended(self) -> list[Operation]:
        """Return the queued operations that were cancelled, which leave the queue."""
        ended = [operation for operation, _ in self._pending if operation.has_ended]
        self._pending = deque(entry for entry in self._pending if not entry[0].has_ended)
        return ended

    def _join_equal(self, request: Asked, key: str | None, client: str) -> Operation | None:
        """Join and return the operation that does what ``request`` asks for, unless a later one would undo that."""
        for other, _ in reversed(self._pending):
            if other.is_shared_with(key, client) and other.join(request):
                return other
            if conflicts(request, other):
                return None
        return None

    def _enqueue(self, request: Asked, work: Work, key: str | None, client: str) -> Operation:
        conflicting = next((other for other, _ in self._pending if conflicts(request, other)), None)
        if conflicting is not None and not request.wait:
            refused = f"cannot {request.operation} {tag_list(request.tags)}"
            raise conflicting.conflict(refused, f"Try again when it is done{OR_WAIT}")
        if len(self._pending) >= MAX_PENDING:
            raise TooManyOperationsError(f"{MAX_PENDING} operations are waiting already; try again later")
        if self._worker is None or not self._worker.is_alive():
            self._worker = start_thread("memsaver-operations", self._run)
        if conflicting is None:
            for other, _ in self._pending:
                other.expedite(request, client)
        operation = Operation(
            uuid.uuid4().hex[:12], request, client, ENGINE, key, self._memory, self._phase_timeout_s, self._changed
        )
        self._pending.append((operation, work))
        self._history.add(operation)
        self._changed.notify()
        return operation

    # On the worker's thread.

    @reserved_heap()
    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._closed, IDLE_S)
                if not self._pending:
                    self._worker = None
                    return
                operation, work = self._pending[0]
                operation.start("wait" if operation.request.operation == "resume" else "drain")
            self._execute(operation, work)
            del operation, work

    def _execute(self, operation: Operation, work: Work) -> None:
        report: OperationReport | None = None
        error: BaseException | None = None
        try:
            operation.log = PhaseLog(self._memory.read_devices)  # which may fail as well
            report = work(operation, operation.log)
            operation.weights_version = self.weights_version()
            operation.table.next(operation.state, "done")  # raises if the operation may not end so
        except BaseException as raised:
            report, error = None, raised
        # It ends and leaves the queue at once: no call joins or conflicts with an operation that has ended.
        with self._changed:
            operation.finish(report, error)
            self._pending.popleft()
            self._history.forget()
        self._conclude(operation)

    def _conclude(self, *ended: Operation) -> None:
        """Record operations that have ended, and notify their callers."""
        for operation in ended:
            try:
                self._on_finished(operation)
            except Exception:
                logger.exception("operation %s has ended, but could not be recorded", operation.id)
            finally:
                operation.answer_callers()


def conflicts(request: Asked, other: Operation) -> bool:
    """Whether ``request`` cannot simply run after ``other``."""
    if other.blocks_others:
        return True
    if other.request.operation == "resize":  # equal ones are joined; it gives way to other operations
        return request.operation == "resize" and other.client != BALANCER
    if request.operation == other.request.operation:
        return False
    return not request.tags or not other.request.tags or not set(request.tags).isdisjoint(other.request.tags)
