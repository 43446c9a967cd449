"""vLLM's API server: its engine client, called from other threads, and admission to its HTTP application."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from memsaver_core.ranks.protocol import Plain
from memsaver_server.engine import AdmissionClosedError, DrainMode, DrainTimeoutError

logger = logging.getLogger("memsaver")


class AsyncClient:
    """vLLM's asynchronous engine client, for threads other than that of its loop."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    def call(self, message: Plain) -> list[Plain]:
        answers: list[Plain] = self._wait(self._engine.collective_rpc("memsaver", args=(message,)))
        return answers

    def sleep(self, level: int) -> None:
        self._wait(self._engine.sleep(level, "keep"))

    def pause(self, mode: DrainMode, timeout_s: float) -> None:
        pausing = self._start(self._engine.sleep(0, mode))
        try:
            pausing.result(timeout_s)
        except (FutureTimeoutError, TimeoutError):
            pausing.cancel()
            raise DrainTimeoutError(timeout_s, self._pending()) from None

    def wake_up(self, tags: list[str] | None) -> None:
        """Have vLLM resume ``tags``, all if None. Does not block."""
        waking = self._start(self._engine.wake_up(tags))
        waking.add_done_callback(_log_failure)

    def reset_prefix_cache(self) -> None:
        self._wait(self._engine.reset_prefix_cache())

    def is_alive(self) -> bool:
        return not self._engine.errored

    def _pending(self) -> list[str]:
        states = getattr(getattr(self._engine, "output_processor", None), "request_states", {})
        return sorted(str(getattr(state, "external_req_id", name)) for name, state in list(states.items()))

    def _start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._start(work).result()


def _log_failure(done: Future[Any]) -> None:
    if not done.cancelled() and done.exception() is not None:
        logger.error("vLLM did not continue: %s", done.exception())


class HttpAdmission:
    """Admission to vLLM's HTTP server. Requests inside are vLLM's to count, and to queue while it is paused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._hold = 0
        self._held: set[asyncio.Future[None]] = set()

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        with self._lock:
            self._closed, self._hold = reason, hold

    def open_admission(self) -> None:
        with self._lock:
            self._closed = None
            held, self._held = self._held, set()
        for waiting in held:
            waiting.get_loop().call_soon_threadsafe(_end, waiting)

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def drain(self, timeout_s: float, mode: DrainMode = "wait") -> None:
        """Do nothing: an admitted request is vLLM's to drain."""

    async def enter(self) -> None:
        """Return when a request may enter.

        Raises:
            AdmissionClosedError: it may not, and no more requests may wait.
        """
        with self._lock:
            if self._closed is None:
                return
            if len(self._held) >= self._hold:
                raise AdmissionClosedError(self._closed)
            waiting = asyncio.get_running_loop().create_future()
            self._held.add(waiting)
        try:
            await waiting
        finally:
            with self._lock:
                self._held.discard(waiting)


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
