"""The scheduler: a thread that admits requests and computes them in batches."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from memsaver_core import MemsaverError, hibernation
from memsaver_server.engine import DRAIN_POLL_S, AdmissionClosedError, DrainMode, DrainTimeoutError, never
from memsaver_server.reference.requests import Request, Row, SlotTable
from memsaver_server.threads import start_thread

if TYPE_CHECKING:
    from memsaver_server.reference.runner import ModelRunner

log = logging.getLogger("memsaver.engine")
_Result = TypeVar("_Result")

#: How long closing waits for a step, seconds; a step takes milliseconds unless the device hangs.
_LAST_STEP_S = 30.0


class EngineDeadError(MemsaverError):
    """The engine can compute nothing more, for ``reason``. Nothing was computed."""

    kind = "engine_dead"
    status = 503

    def __init__(self, reason: BaseException | str) -> None:
        super().__init__(f"the engine is dead: {reason}")


class Scheduler:
    """Continuous batching over a runner, made and driven by one thread.

    Accepted requests are in flight until they are answered, with or without a slot. After a drain nothing is computed
    until admission opens: this is checked before every step, so that no step touches released memory.
    """

    def __init__(self, make_runner: Callable[[], ModelRunner]) -> None:
        """Start the thread and wait for its runner; raise what ``make_runner`` raises there, or NoThreadError."""
        self._make_runner = make_runner
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closed: str | None = None
        self._hold = 0
        self._quiesced = False
        self._busy = False
        self._stopping = False
        self._failure: BaseException | None = None
        self._decode_next = False
        self._slots = SlotTable(0, 1)
        ready: Future[ModelRunner] = Future()
        self._thread = start_thread("memsaver-engine", partial(self._main, ready))
        self.runner = ready.result()

    @property
    def alive(self) -> bool:
        return not self._ended and self._thread.is_alive()

    def submit(self, request: Request) -> Future[Request]:
        """Queue a request; cancelling its future ends it.

        Raises:
            AdmissionClosedError: the engine takes no requests now.
            EngineDeadError: the engine is dead.
        """
        with self._changed:
            if self._failure is not None:
                raise EngineDeadError(self._failure)
            if self._stopping:
                raise AdmissionClosedError("the engine is shutting down")
            if self._closed is not None:
                held = sum(other.held and not other.future.cancelled() for other in self._waiting)
                if held >= self._hold:
                    full = f"; {held} requests wait already" if self._hold else ""
                    raise AdmissionClosedError(self._closed + full)
                request.held = True
            self._waiting.append(request)
            self._changed.notify_all()
        request.future.add_done_callback(self._wake)
        return request.future

    def close_admission(self, reason: str, hold: int) -> None:
        """Refuse new requests; up to ``hold`` of them wait until admission opens."""
        with self._changed:
            self._closed, self._hold = reason, hold

    def open_admission(self) -> None:
        """Take requests again; held and frozen ones continue."""
        with self._changed:
            self._closed = None
            self._quiesced = False
            for request in self._waiting:
                request.held = False
            self._changed.notify_all()

    def drain(self, timeout_s: float, mode: DrainMode, given_up: Callable[[], bool] = never) -> None:
        """Drain as ``mode`` says, and compute nothing until `open_admission`.

        Raises:
            DrainTimeoutError: it took longer than ``timeout_s`` or was given up. Nothing is frozen that was not before.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            quiesced_before = self._quiesced
            self._quiesced = quiesced_before or mode != "wait"
            if mode == "abort":
                self.abort("aborted: generation was stopped")
            while not self._is_drained():
                self._changed.wait(max(0.0, min(DRAIN_POLL_S, deadline - time.monotonic())))
                # Check again: the last change may have come with the deadline.
                if (given_up() or time.monotonic() >= deadline) and not self._is_drained():
                    self._quiesced = quiesced_before
                    self._changed.notify_all()
                    raise DrainTimeoutError(timeout_s, [request.name for request in self._in_flight()])
            self._quiesced = True

    def abort(self, message: str) -> None:
        """End every request in flight with the tokens that it has."""
        with self._changed:  # reentrant: a drain aborts with the lock held
            for request in self._in_flight():
                request.abort(message)
            if not self._busy:
                self._sweep()
            self._changed.notify_all()

    def forget_prefixes(self) -> None:
        with self._changed:
            self._slots.forget()

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` between two steps in the runner's thread; return or raise what it does."""
        future: Future[_Result] = Future()
        with self._changed:
            if not self.alive:
                raise EngineDeadError(self._failure or "it was shut down")
            self._calls.append((work, future))
            self._changed.notify_all()
        return future.result()

    def forget_cache(self) -> None:
        """Have requests in flight compute their cache again, which is lost or stale. Only inside `call`."""
        with self._changed:
            self._slots.forget()
            for request in self._running:
                request.cached = 0

    def fail(self, error: BaseException) -> None:
        """The engine is dead because of ``error``: requests in flight are answered with it."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and its runner. Requests in flight fail. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_LAST_STEP_S)
            if self._thread.is_alive():
                log.error("a step has not ended for %g s; the process continues without waiting for it", _LAST_STEP_S)

    @property
    def _ended(self) -> bool:
        return self._stopping or self._failure is not None

    # With the lock held.

    def _in_flight(self) -> list[Request]:
        return [*self._running, *(request for request in self._waiting if not request.held)]

    def _is_drained(self) -> bool:
        if not self.alive:
            return True
        return not self._busy and not self._calls and (self._quiesced or not self._in_flight())

    def _sweep(self) -> None:
        """Answer requests that have ended, drop cancelled ones, and free their slots."""
        ended = [r for r in (*self._running, *self._waiting) if r.finish is not None or r.future.cancelled()]
        for request in ended:
            self._remove(request)
            if request.future.set_running_or_notify_cancel():
                request.future.set_result(request)

    def _fail(self, requests: Sequence[Request], error: BaseException) -> None:
        for request in requests:
            self._remove(request)
            if request.future.set_running_or_notify_cancel():
                request.future.set_exception(error)

    def _remove(self, request: Request) -> None:
        if request.slot >= 0:
            self._slots.give_back(request.slot)
            request.slot = -1
        for requests in (self._running, self._waiting):
            with contextlib.suppress(ValueError):
                requests.remove(request)
        self._changed.notify_all()

    def _wake(self, _: Future[Request]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _admit(self) -> None:
        while self._slots.free:
            request = next((request for request in self._waiting if not request.held), None)
            if request is None:
                return
            self._waiting.remove(request)
            request.slot, request.cached = self._slots.take(request.ids)
            request.reused = request.cached
            self._running.append(request)

    def _choose(self) -> list[Request]:
        """Return what to compute next: one request's next chunk, or a batch's next tokens, alternately."""
        self._sweep()
        if self._quiesced:
            return []
        self._admit()
        prefills = [request for request in self._running if request.needs_prefill]
        decodes = [request for request in self._running if not request.needs_prefill]
        if prefills and not (decodes and self._decode_next):
            self._decode_next = True
            return prefills[:1]
        self._decode_next = False
        batch = decodes[: self.runner.max_batch]
        if len(decodes) > len(batch):  # round-robin if they exceed a batch
            self._running = [request for request in self._running if request not in batch] + batch
        return batch

    # On the scheduler's thread.

    def _main(self, ready: Future[ModelRunner]) -> None:
        try:
            self.runner = self._make_runner()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # frames hold the incomplete runner and its device memory
            ready.set_exception(error)
            return
        self._slots = SlotTable(self.runner.slots, self.runner.chunk)
        ready.set_result(self.runner)
        with torch.no_grad():
            self._loop()
            if not hibernation.is_hibernated():  # else it would wait for a wake-up
                self.runner.close()
        with self._changed:
            reason = self._failure or AdmissionClosedError("the engine was shut down")
            self._fail([*self._running, *self._waiting], reason)
            for _, future in self._calls:
                future.set_exception(EngineDeadError(reason))
            self._calls.clear()
            self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            chosen: list[Request] = []
            with self._changed:
                while not (self._ended or self._calls or (chosen := self._choose())):
                    self._changed.wait()
                if self._ended:
                    return
                call = self._calls.popleft() if self._calls else None
                self._busy = True
            try:
                if call is not None:
                    self._run(*call)
                else:
                    self._compute(chosen)
            except Exception as error:
                self._failed_step(chosen, error)
            with self._changed:
                self._busy = False
                self._sweep()
                self._changed.notify_all()

    def _run(self, work: Callable[[], Any], future: Future[Any]) -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    def _compute(self, chosen: list[Request]) -> None:
        """Compute one step. Meanwhile other threads only mark the chosen requests aborted."""
        if not chosen[0].needs_prefill:
            rows = [Row(request.slot, request.cached, request.ids[-1], request.sampler) for request in chosen]
            for request, token in zip(chosen, self.runner.decode(rows), strict=True):
                request.cached += 1
                request.accept(token, self.runner.stop_ids, self.runner.length)
            return
        request = chosen[0]
        ids = request.ids
        start = request.cached - request.cached % self.runner.chunk
        chunk = ids[start : start + self.runner.chunk]
        last = start + len(chunk) == len(ids)
        next_token = self.runner.prefill(request.slot, chunk, start, request.sampler if last else None)
        request.cached = start + len(chunk)
        with self._changed:
            self._slots.remember(request.slot, ids[: request.cached])
        if next_token is not None:
            request.accept(next_token, self.runner.stop_ids, self.runner.length)

    def _failed_step(self, chosen: list[Request], error: Exception) -> None:
        log.exception("a step failed; the requests in it are answered with the error")
        try:
            self.runner.check()
        except Exception as lost:
            log.critical("the engine is dead: %s", lost)
            self._failure = lost
        with self._changed:
            self._fail(chosen, error)
