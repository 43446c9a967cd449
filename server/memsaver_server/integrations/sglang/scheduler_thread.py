"""Running the service's work in the thread of SGLang's scheduler, between two batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import memsaver_core as ms
from memsaver_core.errors import MemsaverError

#: How often a caller that waits for the scheduler checks that it still runs, seconds.
LIVENESS_S = 1.0

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
        """Note that the event loop runs in this thread."""
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
        """Run ``work`` there, and return what it returns.

        Raises:
            MemsaverError: the event loop ended first.
        """
        future = self.submit(work)
        self.wait_for(future, float("inf"))
        return future.result()

    def wait_for(self, future: Future[Any], timeout_s: float) -> None:
        """Return once ``future`` is done, or after ``timeout_s`` seconds.

        Raises:
            MemsaverError: the event loop ended first.
        """
        deadline = time.monotonic() + timeout_s
        while not wait([future], max(0.0, min(LIVENESS_S, deadline - time.monotonic()))).done:
            if not self.is_alive():
                raise MemsaverError("SGLang's scheduler has stopped; restart the engine")
            if time.monotonic() >= deadline:
                return
