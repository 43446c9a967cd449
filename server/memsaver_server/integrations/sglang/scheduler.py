"""SGLang's scheduler: the service's work in its thread, between two batches, and admission of what it receives."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from http import HTTPStatus
from types import ModuleType
from typing import Any, TypeVar

import memsaver_core as ms
from memsaver_core.errors import MemsaverError
from memsaver_server.engine import DRAIN_POLL_S, never

T = TypeVar("T")


class SchedulerThread:
    """A queue of work. The scheduler's event loop calls ``run_pending`` in each iteration; all else is for others."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._pending: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._thread: threading.Thread | None = None

    def is_alive(self) -> bool:
        """Return whether the event loop runs, or has not begun yet, and the device's context works."""
        running = self._thread is None or self._thread.is_alive()
        return running and not self._scheduler.gracefully_exit and ms.status().state != "failed"

    def note_current(self) -> None:
        self._thread = threading.current_thread()

    def run_pending(self) -> None:
        while self._pending:
            future, work = self._pending.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Have ``work`` run in the next iteration."""
        future: Future[T] = Future()
        self._pending.append((future, work))
        return future

    def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` there, and return what it returns; raise MemsaverError if the event loop ended first."""
        future = self.submit(work)
        self.wait_for(future, float("inf"))
        return future.result()

    def wait_for(self, future: Future[Any], timeout_s: float, given_up: Callable[[], bool] = never) -> None:
        """Return once ``future`` is done or ``given_up()``, or after ``timeout_s`` seconds; raise MemsaverError as
        ``run``."""
        deadline = time.monotonic() + timeout_s
        while not wait([future], max(0.0, min(DRAIN_POLL_S, deadline - time.monotonic()))).done:
            if not self.is_alive():
                raise MemsaverError("SGLang's scheduler has stopped; restart the engine")
            if given_up() or time.monotonic() >= deadline:
                return


class Intake:
    """Filters what the scheduler receives. ``close`` and ``open`` may be called from any thread."""

    def __init__(self, scheduler: Any, messages: ModuleType) -> None:
        """``messages`` is ``sglang.srt.managers.io_struct``."""
        self._scheduler = scheduler
        self._messages = messages
        self._closed: tuple[str, int] | None = None  # the reason, and how many requests may be held
        self._held: list[Any] = []  # of the scheduler's thread alone

    @property
    def is_open(self) -> bool:
        return self._closed is None

    def close(self, reason: str, hold: int) -> None:
        self._closed = (reason, hold)

    def open(self) -> None:
        self._closed = None

    def admit(self, received: Sequence[Any]) -> list[Any]:
        """Return what of ``received``, and of what was held, the scheduler gets. In the scheduler's thread."""
        messages = self._messages
        batches = (messages.BatchTokenizedGenerateReqInput, messages.BatchTokenizedEmbeddingReqInput)
        work = (*batches, messages.TokenizedGenerateReqInput, messages.TokenizedEmbeddingReqInput)
        closed = self._closed
        admitted: list[Any] = []
        if closed is None:
            admitted, self._held = self._held, []
        for request in received:
            if isinstance(request, messages.AbortReq):
                self._abort_held(request)
            if closed is None or not isinstance(request, work):
                admitted.append(request)
                continue
            for each in list(request) if isinstance(request, batches) else [request]:
                self._hold_or_refuse(each, *closed)
        return admitted

    def _hold_or_refuse(self, request: Any, reason: str, hold: int) -> None:
        if request.rid.startswith("HEALTH_CHECK"):
            # As SGLang answers it while busy: the process is healthy, with or without its memory.
            self._scheduler.return_health_check_ipcs.append(getattr(request, "http_worker_ipc", None))
            self._scheduler.maybe_send_health_check_signal()
        elif len(self._held) < hold:
            self._held.append(request)
        else:
            self._answer_aborted(request, reason)

    def _abort_held(self, abort: Any) -> None:
        leaving = [each for each in self._held if abort.abort_all or each.rid.startswith(abort.rid)]
        self._held = [each for each in self._held if each not in leaving]
        for each in leaving:
            self._answer_aborted(each)

    def _answer_aborted(self, request: Any, reason: str = "") -> None:
        finished = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": reason}
        answer = self._messages.AbortReq(rid=request.rid, finished_reason=finished if reason else None)
        self._scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)
