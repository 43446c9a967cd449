"""The queue of operations: one runs at a time, in order of arrival; a repeat joins the one in flight.

A worker thread runs them, so a client that disconnects cancels nothing.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from memsaver_core import MemsaverError, PhaseLog
from memsaver_core.reports import OperationReport
from memsaver_server.engine import LOCAL_MEMORY, Memory
from memsaver_server.heap_reserve import reserved_heap
from memsaver_server.operation import Operation, OperationRequest, tag_list

#: Operations that may wait or run; more are refused.
MAX_PENDING = 128
#: Idle time after which the worker thread ends, seconds. Starting one per operation takes longer than an operation on
#: little memory.
IDLE_S = 30.0

Work = Callable[[PhaseLog], OperationReport]


class ConflictError(MemsaverError):
    """The operation ``running`` would undo the one that is requested."""

    kind = "conflict"
    status = 409
    retry_after_s = 1

    def __init__(self, request: OperationRequest, running: Operation) -> None:
        self.running = running
        super().__init__(
            f"cannot {request.operation} {tag_list(request.tags)}: {running.request.operation} {running.id} of "
            f'{tag_list(running.request.tags)} is in progress. Try again when it is done, or send "wait": true'
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
        self._by_key: OrderedDict[str, Operation] = OrderedDict()
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

        Args:
            wait: queue behind a conflicting operation instead of failing.
            key: the caller's Idempotency-Key. A repeat under the same key gets the first operation, however long ago
                that was, unless it failed.

        Raises:
            ConflictError, IdempotencyKeyError, TooManyOperationsError: nothing was started.
        """
        with self._changed:
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
            self._history[operation.id] = operation
            if key is not None:
                self._by_key[key] = operation
            self._forget()
            if self._worker is None:
                self._worker = threading.Thread(target=self._run, name="memsaver-operations", daemon=True)
                self._worker.start()
            else:
                self._changed.notify()
        return operation

    def close(self) -> None:
        """Let the worker end once the queue is empty; while it lives it keeps a reference to the engine."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _repeated(self, request: OperationRequest, key: str | None) -> Operation | None:
        first = self._by_key.get(key) if key is not None else None
        if key is not None and first is not None:
            if first.request != request:
                raise IdempotencyKeyError(key, first)
            if first.status != "failed":
                return first
        # The latest equal one: its result is the state that its callers will find.
        return next((other for other, _ in reversed(self._pending) if other.request == request), None)

    def _forget(self) -> None:
        """Drop all but pending operations and the last ``history`` others."""
        for remembered in (self._history, self._by_key):
            while len(remembered) > self._history_limit + len(self._pending):
                remembered.popitem(last=False)

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
            report = work(operation.start())  # start() reads the devices, which may fail as well
        except BaseException as raised:
            error = raised
        operation.finish(report, error)
        self._on_finished(operation)
        # Dequeue before the callers are notified: their next request must not conflict with this operation.
        with self._changed:
            self._pending.popleft()
            self._forget()
        operation.done.set_result(None)


def _conflict(one: OperationRequest, other: OperationRequest) -> bool:
    if one.operation == other.operation:
        return False
    return not one.tags or not other.tags or not set(one.tags).isdisjoint(other.tags)
