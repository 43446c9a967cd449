"""The scheduler: a thread that admits requests and computes them in batches, with a cache of prefixes."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import torch

from memsaver_core import MemsaverError, hibernation
from memsaver_core.contract.errors import AdmissionClosedError, DrainTimeoutError
from memsaver_core.contract.requests import DrainMode
from memsaver_core.rendezvous import settle
from memsaver_server.engine import check_drain_mode, never, waits
from memsaver_server.engine.limited_pages import LimitedPages
from memsaver_server.reference.requests import Request
from memsaver_server.reference.runner import ModelRunner
from memsaver_server.threads import start_thread

log = logging.getLogger("memsaver.engine")
_Result = TypeVar("_Result")

#: How long ``close`` waits for the step in progress, seconds. A step takes milliseconds unless the device hangs.
_LAST_STEP_S = 30.0


class EngineDeadError(MemsaverError, kind="engine_dead", status=503):
    """The engine can compute nothing more. Nothing was computed."""


class SlotTable:
    """The slots, and the prefixes that they hold. Only whole chunks are reused. A chunk is always computed in the same
    shape at the same position, so a reused one is bit by bit what computing it again would give. The first ``count``
    slots have memory, and only the first ``limit`` are taken."""

    def __init__(self, slots: int, chunk: int) -> None:
        self._chunk = chunk
        self._prefixes: list[list[int]] = [[]] * slots  # whose keys and values each slot holds
        self.free = list(range(slots))  # in the order of their return
        self.count = self.limit = slots

    @property
    def available(self) -> list[int]:
        """The free slots that may be taken."""
        return [slot for slot in self.free if slot < self.limit]

    def resize(self, count: int) -> None:
        """Note that only the first ``count`` slots have memory from now on, and what the others held is gone."""
        self.count = self.limit = count
        self._prefixes[count:] = [[]] * (len(self._prefixes) - count)

    def take(self, ids: Sequence[int]) -> tuple[int, int]:
        """Take a free slot: the one that holds most of the beginning of ``ids``, else an empty one, else the least
        recently used. Return it, and how many of the ids it holds: never all, as the last one gives the next token."""
        best = max(self.available, key=lambda slot: (self._common(slot, ids), not self._prefixes[slot]))
        self.free.remove(best)
        self._prefixes[best] = self._prefixes[best][: self._common(best, ids)]
        return best, len(self._prefixes[best])

    def remember(self, slot: int, ids: Sequence[int]) -> None:
        """Record that ``slot`` holds the keys and values of ``ids``."""
        self._prefixes[slot] = list(ids[: len(ids) // self._chunk * self._chunk])

    def forget(self) -> None:
        self._prefixes = [[]] * len(self._prefixes)

    def _common(self, slot: int, ids: Sequence[int]) -> int:
        held = self._prefixes[slot]
        ends = range(self._chunk, min(len(held), len(ids) - 1) + 1, self._chunk)
        return max((end for end in ends if held[:end] == ids[:end]), default=0)


class Scheduler(LimitedPages):
    """Continuous batching on one thread, which also makes the runner: the part of ``Engine`` that needs no model. An
    accepted request is in flight until it is answered, with or without a slot. After a drain nothing is computed until
    admission opens. Each step is preceded by a check of this, so that no step touches released memory."""

    def __init__(
        self, make_runner: Callable[[], ModelRunner], wait: Callable[[Future[ModelRunner]], object] = Future.result
    ) -> None:
        """Start the thread and ``wait`` for its runner; raises what ``make_runner`` raises there, or NoThreadError."""
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._held: list[Request] = []  # requests that wait for admission to open; a drain does not wait for them
        self._running: list[Request] = []
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._closed: str | None = None
        self._hold = 0
        self._quiesced = False
        self._busy = False
        self._failure: BaseException | None = None
        ready: Future[ModelRunner] = Future()
        self._thread = start_thread("memsaver-engine", partial(self._main, make_runner, ready))
        wait(ready)

    def is_alive(self) -> bool:
        return self._failure is None and self._thread.is_alive()

    def enqueue(self, request: Request) -> Future[Request]:
        """Queue a request; cancelling the future ends it. Raises AdmissionClosedError or EngineDeadError."""
        with self._changed:
            self._check_alive()
            if self._closed is None:
                self._waiting.append(request)
            else:
                held = sum(not other.future.cancelled() for other in self._held)
                if held >= self._hold:
                    full = f"; {held} requests wait already" if self._hold else ""
                    raise AdmissionClosedError(self._closed + full)
                self._held.append(request)
            self._changed.notify_all()
        request.future.add_done_callback(self._wake)  # for one that is cancelled
        return request.future

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        with self._changed:
            self._closed, self._hold = reason, hold

    def open_admission(self) -> None:
        with self._changed:
            self._closed, self._quiesced = None, False
            self._waiting.extend(self._held)
            self._held.clear()
            self._changed.notify_all()

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        """See ``Engine``. Frozen requests continue from the KV cache; if that was not kept, it is computed again."""
        check_drain_mode(mode)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            quiesced_before = self._quiesced
            self._quiesced = quiesced_before or mode != "wait"
            if mode == "abort":
                self.abort_all("aborted: generation was stopped")
            pauses = waits(deadline, given_up, time.monotonic)
            if not any(self._changed.wait_for(self._is_drained, wait_s) for wait_s in pauses):
                self._quiesced = quiesced_before
                self._changed.notify_all()
                raise DrainTimeoutError(timeout_s, [request.name for request in self._in_flight()])
            self._quiesced = True

    def abort_all(self, message: str = "aborted by request") -> None:
        """End every request in flight, with its tokens so far."""
        with self._changed:  # reentrant: a drain aborts with the lock held
            for request in self._in_flight():
                request.finish = {"type": "abort", "message": message}
            if not self._busy:
                self._sweep()

    def flush_cache(self) -> None:
        with self._changed:
            self._slots.forget()

    def ask_pages(self, name: str, *arguments: Any) -> dict[str, Any]:
        """See ``LimitedPages``; a page is a slot."""
        if name == "preempt":
            self.call(self._preempt)
        with self._changed:
            match name:
                case "limit":
                    (self._slots.limit,) = arguments
                case "keep":
                    self._slots.resize(*arguments)
                case "waiting":
                    self._check_alive()
            self._changed.notify_all()
            used = [request.slot for request in self._running]
            late = [request.name for request in self._running if request.slot >= self._slots.limit]
            if name not in ("read", "keep"):
                return {"result": late if name == "late" else len(late)}
            pages = {"total": self.runner.slots, "kept": self._slots.count, "least": 1}
            size = {"page_bytes": self.runner.slot_bytes, "page_tokens": self.runner.length}
            return {"result": {**pages, **size, "used": len(used), "needed": max(used, default=-1) + 1}}

    def back_pages(self, pages: int, before: int) -> None:
        self.call(partial(self.runner.resize, pages))

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` in the runner's thread, between two steps."""
        future: Future[_Result] = Future()
        with self._changed:
            self._check_alive()
            self._calls.append((work, future))
            self._changed.notify_all()
        return future.result()

    def forget_cache(self) -> None:
        """Have requests in flight compute their keys and values again. Only inside ``call``."""
        with self._changed:
            self._slots.forget()
            for request in self._running:
                request.cached = 0

    def fail(self, error: BaseException) -> None:
        """Compute nothing more, and answer requests in flight with ``error``."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and its runner. Requests in flight fail. Idempotent."""
        self.fail(AdmissionClosedError("the engine is shutting down"))
        if self._thread is not threading.current_thread():
            self._thread.join(_LAST_STEP_S)
            if self._thread.is_alive():
                log.error("a step has not ended for %g s; the process continues without waiting for it", _LAST_STEP_S)

    def _wake(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    # With the lock held.

    def _check_alive(self) -> None:
        if isinstance(self._failure, AdmissionClosedError):
            raise self._failure
        if self._failure is not None:
            raise EngineDeadError(f"the engine is dead: {self._failure}")

    def _in_flight(self) -> list[Request]:
        return [*self._running, *self._waiting]

    def _is_drained(self) -> bool:
        idle = not self._busy and not self._calls
        return not self.is_alive() or (idle and (self._quiesced or not self._in_flight()))

    def _sweep(self) -> None:
        """Answer the requests that have ended, drop those that were cancelled, and free the slots of both."""
        for requests in (self._running, self._waiting, self._held):
            for request in [each for each in requests if each.finish is not None or each.future.cancelled()]:
                requests.remove(request)
                if request.slot >= 0:
                    self._slots.free.append(request.slot)
                if not request.future.set_running_or_notify_cancel():
                    continue
                if isinstance(request.finish, BaseException):
                    request.future.set_exception(request.finish)
                else:
                    request.future.set_result(request)
        self._changed.notify_all()

    def _choose(self) -> list[Request]:
        """Return what to compute next: one request, whose next chunk is missing, or a batch for its next tokens."""
        self._sweep()
        if self._quiesced:
            return []
        while self._slots.available and self._waiting:
            request = self._waiting.popleft()
            request.slot, request.cached = self._slots.take(request.ids)
            request.reused = request.cached
            self._running.append(request)
        prompts = [request for request in self._running if request.needs_prefill]
        return prompts[:1] or self._running[: self.runner.max_batch]

    # On the scheduler's thread.

    def _preempt(self) -> None:
        """Have the requests in slots behind the limit wait again, before all others."""
        with self._changed:
            for request in [each for each in reversed(self._running) if each.slot >= self._slots.limit]:
                self._running.remove(request)
                self._waiting.appendleft(request)
                self._slots.free.append(request.slot)
                request.slot, request.cached = -1, 0

    def _main(self, make_runner: Callable[[], ModelRunner], ready: Future[ModelRunner]) -> None:
        try:
            self.runner = make_runner()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold the incomplete runner, and its device memory
            ready.set_exception(error)
            return
        self._slots = SlotTable(self.runner.slots, self.runner.chunk)
        ready.set_result(self.runner)
        with torch.no_grad():
            failure = self._loop()
        with self._changed:
            for request in (*self._in_flight(), *self._held):
                request.finish = request.finish or failure
            self._sweep()
            for _, future in self._calls:
                future.set_exception(EngineDeadError(f"the engine is dead: {failure}"))
        if not hibernation.is_hibernated():  # while hibernated, close() would wait for a wake-up
            self.runner.close()

    def _loop(self) -> BaseException:
        """Compute until the engine fails or is closed; return why."""
        while True:
            with self._changed:
                while not (self._failure or self._calls or (chosen := self._choose())):
                    self._changed.wait()
                if self._failure:
                    return self._failure
                work, future = self._calls.popleft() if self._calls else (partial(self._compute, chosen), Future())
                self._busy = True
            settle(future, work)
            with self._changed:
                self._busy = False
                self._sweep()

    def _compute(self, chosen: list[Request]) -> None:
        """Compute one step. Other threads change nothing of the chosen requests but ``finish``."""
        chunk = self.runner.chunk if chosen[0].needs_prefill else 1
        rows = [(each.slot, each.cached, each.ids[each.cached : each.cached + chunk]) for each in chosen]
        try:
            for row, (request, token) in enumerate(zip(chosen, self.runner.compute(rows), strict=True)):
                request.cached += len(rows[row][2])
                if chunk > 1:
                    with self._changed:
                        self._slots.remember(request.slot, request.ids[: request.cached])
                if request.cached == len(request.ids):
                    drawn = token if request.greedy else request.pick(self.runner.logits[row])
                    request.accept(drawn, self.runner.stop_ids, self.runner.length)
        except Exception as error:
            log.exception("a step failed; the requests in it are answered with the error")
            for request in chosen:
                request.finish = error
            try:
                self.runner.check()
            except Exception as lost:
                log.critical("the engine is dead: %s", lost)
                self.fail(lost)
