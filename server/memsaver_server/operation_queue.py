"""The queue of operations: one runs at a time, in order of arrival; a repeat joins the one in flight.

A worker thread runs them, so a client that disconnects cancels nothing. ``cancel`` does, before memory is moved.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from memsaver_core import MemsaverError, PhaseLog
from memsaver_core.reports import OperationReport
from memsaver_server.cancellation import OperationCancelledError
from memsaver_server.engine import LOCAL_MEMORY, Memory
from memsaver_server.heap_reserve import reserved_heap
from memsaver_server.lease import LEASE_END
from memsaver_server.operation import Operation, OperationRequest, tag_list
from memsaver_server.threads import start_thread

logger = logging.getLogger("memsaver")

#: Operations that may wait or run; more are refused.
MAX_PENDING = 128
#: Idle time after which the worker thread ends, seconds. Starting one per operation takes longer than an operation on
#: little memory.
IDLE_S = 30.0
#: Idempotency-Keys that are remembered for each operation: those of its last callers.
MAX_KEYS = 1024

Work = Callable[[Operation, PhaseLog], OperationReport]


class ConflictError(MemsaverError):
    """The operation ``running`` would undo the one that is requested, or is prepared and has to end first."""

    kind = "conflict"
    status = 409
    retry_after_s = 1

    def __init__(self, request: OperationRequest, running: Operation) -> None:
        self.running = running
        super().__init__(
            f"cannot {request.operation} {tag_list(request.tags)}: {running.request.operation} {running.id} of "
            f"{tag_list(running.request.tags)} is {'prepared' if running.blocks_others else 'in progress'}. Try again "
            f'when it is done, or send "wait": true'
        )

    def details(self) -> dict[str, Any]:
        return {"operation": self.running.request.operation, "operation_id": self.running.id}


class TooManyOperationsError(MemsaverError):
    """The queue of operations is full."""

    kind = "too_many_operations"
    status = 503
    retry_after_s = 1

    def __init__(self) -> None:
        super().__init__(f"{MAX_PENDING} operations are waiting already; try again later")


class TooLateToCancelError(MemsaverError):
    """The operation has ended, or is unmapping or mapping memory, which is not interrupted."""

    kind = "too_late"
    status = 409

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        verb = operation.request.operation
        if operation.has_ended:
            happened = "has ended already"
        else:
            happened = "is unmapping memory already and will complete"
            if verb == "resume":
                happened = "is mapping memory already and will complete if the device has enough"
        super().__init__(
            f"{verb} {operation.id} cannot be cancelled: it {happened}; to undo it, "
            f"{'resume' if verb == 'release' else 'release'} the tags"
        )

    def details(self) -> dict[str, Any]:
        return {"operation_id": self.operation.id}


class LeaseEndedError(MemsaverError):
    """An operation cannot be committed: it is not prepared any more, or not yet. Nothing was moved."""

    kind = "lease_ended"
    status = 409

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        name = f"{operation.request.operation} {operation.id}"
        if operation.lease is None:
            why = "it was not prepared, and needs no commit"
        elif operation.lease.cancelled_by is not None:
            why = f"it was cancelled by {operation.lease.cancelled_by}; memory and admission are as before"
        else:
            why = str(operation.error) if operation.error is not None else "it is not prepared yet"
        super().__init__(f"{name} cannot be committed: {why}. Prepare again if needed")

    def details(self) -> dict[str, Any]:
        by = None if self.operation.lease is None else self.operation.lease.cancelled_by
        return {"operation_id": self.operation.id, **({"cancelled_by": by} if by else {})}


class IdempotencyKeyError(MemsaverError):
    """An Idempotency-Key was used before, for another request."""

    kind = "idempotency_key_reused"
    status = 422

    def __init__(self, key: str, first: Operation) -> None:
        super().__init__(
            f"Idempotency-Key {key!r} belongs to {first.request.operation} {first.id}, a different request; "
            "use a new key for a new request"
        )


class OperationQueue:
    """Runs operations and remembers the last ``history`` of them. Every method may be called from any thread."""

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
        self._by_key: dict[str, tuple[OperationRequest, Operation]] = {}
        self._pending: deque[tuple[Operation, Work]] = deque()
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None
        self._closed = False
        self._on_finished = on_finished

    @property
    def running(self) -> Operation | None:
        """The operation in progress."""
        with self._changed:
            return self._pending[0][0] if self._pending else None

    def get(self, operation_id: str) -> Operation | None:
        with self._changed:
            return self._history.get(operation_id)

    def recent(self) -> list[Operation]:
        """Return the remembered operations, newest first."""
        with self._changed:
            return list(reversed(self._history.values()))

    def submit(self, request: OperationRequest, work: Work, *, wait: bool, key: str | None, client: str) -> Operation:
        """Enqueue ``work``, or return the operation in flight that ``request`` repeats.

        A call joins an operation only if nothing that would undo it is queued behind that. One that joins a prepared
        operation renews its lease.

        Args:
            wait: queue behind a conflicting operation instead of failing.
            key: the caller's Idempotency-Key. A repeat under the same key gets the operation that its first call got,
                however long ago that was, unless it failed or its lease ended.

        Raises:
            ConflictError, IdempotencyKeyError, NoThreadError, TooManyOperationsError: nothing was started.
        """
        with self._changed:
            operation = self._replayed(request, key) or self._joined(request)
            if operation is None:
                operation = self._enqueue(request, work, wait, client)
            if key is not None and key not in self._by_key:
                self._remember_key(key, request, operation)
        return operation

    def cancel(self, operation: Operation, by: str) -> None:
        """Cancel ``operation`` on behalf of the caller ``by``. It ends soon, a queued one at once. Idempotent.

        Raises:
            TooLateToCancelError: it moves memory already, or has ended otherwise.
        """
        with self._changed:
            if operation.status == "cancelled":
                return
            if operation.has_ended or not operation.cancellation.request(by):
                raise TooLateToCancelError(operation)
            left = deque(entry for entry in self._pending if entry[0] is not operation or entry is self._pending[0])
            if len(left) == len(self._pending):  # the worker ends it, or another caller of this method does
                return
            self._pending = left
            operation.finish(None, OperationCancelledError(operation.cancellation.name, by))
        self._tell(operation)

    def commit(self, operation: Operation) -> None:
        """Let a prepared operation go on. Idempotent.

        Raises:
            LeaseEndedError: it is not prepared, and was not committed.
        """
        if not operation.commit():
            raise LeaseEndedError(operation)

    def close(self) -> None:
        """Cancel what is prepared, and let the worker end once the queue is empty; while it lives it keeps a reference
        to the engine."""
        with self._changed:
            self._closed = True
            for operation, _ in self._pending:
                if operation.blocks_others:
                    operation.cancellation.request("the end of the service")
            self._changed.notify()

    # With the lock held.

    def _replayed(self, request: OperationRequest, key: str | None) -> Operation | None:
        """Return the operation that a call under ``key`` got before, unless that failed or its lease ended."""
        if key is None or key not in self._by_key:
            return None
        first, operation = self._by_key[key]
        if first != request:
            raise IdempotencyKeyError(key, operation)
        expired = operation.has_ended and operation.cancellation.cancelled_by == LEASE_END
        if operation.status != "failed" and not expired:
            return operation
        del self._by_key[key]
        operation.keys.remove(key)  # which names another operation from now on
        return None

    def _joined(self, request: OperationRequest) -> Operation | None:
        """Return the operation whose result is the state that ``request`` asks for, once all that is queued has run."""
        for other, _ in reversed(self._pending):
            if other.join(request):
                return other
            if _conflict(request, other):
                return None
        return None

    def _enqueue(self, request: OperationRequest, work: Work, wait: bool, client: str) -> Operation:
        conflicting = next((other for other, _ in self._pending if _conflict(request, other)), None)
        if conflicting is not None and not wait:
            raise ConflictError(request, conflicting)
        if len(self._pending) >= MAX_PENDING:
            raise TooManyOperationsError
        self._ensure_worker()
        if conflicting is None:
            for other, _ in self._pending:
                other.hasten(request)
        operation = Operation(uuid.uuid4().hex[:12], request, client, time.time(), self._memory, self._phase_timeout_s)
        self._pending.append((operation, work))
        self._history[operation.id] = operation
        self._forget()
        self._changed.notify()
        return operation

    def _ensure_worker(self) -> None:
        if self._worker is None or not self._worker.is_alive():
            self._worker = start_thread("memsaver-operations", self._run)

    def _remember_key(self, key: str, request: OperationRequest, operation: Operation) -> None:
        self._by_key[key] = (request, operation)
        operation.keys.append(key)
        if len(operation.keys) > MAX_KEYS:
            self._by_key.pop(operation.keys.pop(0), None)

    def _forget(self) -> None:
        """Drop all but pending operations and the last ``history`` others, with their keys."""
        pending = {operation.id for operation, _ in self._pending}
        ended = [operation for operation in self._history.values() if operation.id not in pending]
        for operation in ended[: -self._history_limit]:
            del self._history[operation.id]
            for key in operation.keys:
                self._by_key.pop(key, None)

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
            self._execute(operation, work)
            del operation, work

    def _execute(self, operation: Operation, work: Work) -> None:
        report: OperationReport | None = None
        error: BaseException | None = None
        try:
            operation.cancellation.check()
            report = work(operation, operation.start())  # start() reads the devices, which may fail as well
        except BaseException as raised:
            error = raised
        # It ends and leaves the queue at once: no call joins or conflicts with an operation that has ended.
        with self._changed:
            operation.finish(report, error)
            self._pending.popleft()
            self._forget()
        self._tell(operation)

    def _tell(self, operation: Operation) -> None:
        """Record an operation that has ended, and notify its callers."""
        try:
            self._on_finished(operation)
        except Exception:
            logger.exception("operation %s has ended, but could not be recorded", operation.id)
        finally:
            operation.done.set_result(None)
            if operation.lease is not None:
                operation.lease.tell()


def _conflict(request: OperationRequest, other: Operation) -> bool:
    """Whether ``request`` cannot simply run after ``other``."""
    if other.blocks_others:
        return True
    if request.operation == other.request.operation:
        return False
    return not request.tags or not other.request.tags or not set(request.tags).isdisjoint(other.request.tags)
