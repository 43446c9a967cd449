"""The lock under which memory moves or weights are written: releases, resumes and weight updates exclude each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from memsaver_core import MemsaverError, PhaseLog
from memsaver_server.cancellation import Cancellation
from memsaver_server.engine import DRAIN_POLL_S, DrainTimeoutError
from memsaver_server.operation import Operation


class MemoryBusyError(MemsaverError):
    """An operation or a weight update holds the memory in ``phase`` and did not end in time. Nothing was done."""

    kind = "memory_busy"
    status = 504

    def __init__(self, phase: str, message: str) -> None:
        self.phase = phase
        super().__init__(message)

    def details(self) -> dict[str, Any]:
        return {"phase": self.phase}


class MemoryLock:
    """One lock with three ways to wait for it."""

    def __init__(self, phase_timeout_s: float) -> None:
        self._lock = threading.Lock()
        self._phase_timeout_s = phase_timeout_s
        self._updating = False  # the holder is a weight update

    @contextmanager
    def for_release(self, timeout_s: float, deadline: float, given_up: Callable[[], bool]) -> Iterator[None]:
        """Hold the lock. A weight update counts as a request in flight: it has until the drain's deadline.

        Raises:
            DrainTimeoutError: the update still runs at ``deadline``, a time of the monotonic clock, or when
                ``given_up()`` is true.
        """
        if not self._acquire(deadline, given_up):
            raise DrainTimeoutError(timeout_s, ["a weight update"])
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def for_resume(self, log: PhaseLog, cancellation: Cancellation) -> Iterator[None]:
        """Hold the lock; waiting for a weight update is the phase ``wait_for_weights``.

        Raises:
            MemoryBusyError: the update has not ended within the phase timeout.
            OperationCancelledError: the resume was cancelled.
        """
        if not self._lock.acquire(blocking=False):
            with log.phase("wait_for_weights"):
                if not self._acquire(time.monotonic() + self._phase_timeout_s, lambda: cancellation.requested):
                    cancellation.check()
                    raise self._update_too_long("nothing was resumed")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def for_update(self, running: Callable[[], Operation | None]) -> Iterator[None]:
        """Hold the lock for a weight update, after the operation that ``running`` returns as long as it progresses.

        Raises:
            MemoryBusyError: that operation stalls, or another update has not ended within the phase timeout.
        """
        while not self._lock.acquire(timeout=self._phase_timeout_s):
            if self._updating:
                raise self._update_too_long("nothing was written")
            operation = running()
            if operation is not None and (stall := operation.stall()) is not None:
                raise MemoryBusyError(stall.phase, f"no weights were written: {operation.stall_message(stall)}")
        self._updating = True
        try:
            yield
        finally:
            self._updating = False
            self._lock.release()

    def _acquire(self, deadline: float, given_up: Callable[[], bool]) -> bool:
        while not self._lock.acquire(timeout=max(0.0, min(DRAIN_POLL_S, deadline - time.monotonic()))):
            if given_up() or time.monotonic() >= deadline:
                return False
        return True

    def _update_too_long(self, consequence: str) -> MemoryBusyError:
        return MemoryBusyError(
            "wait_for_weights",
            f"a weight update has not ended after {self._phase_timeout_s:g} s; {consequence}. Repeat the call "
            "when it is done",
        )
