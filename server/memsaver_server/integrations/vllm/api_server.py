"""vLLM's API server: its engine client, called from other threads, admission to it, and routes in front of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from memsaver_core.ranks.protocol import Plain
from memsaver_server.engine import DRAIN_POLL_S, AdmissionClosedError, DrainMode, DrainTimeoutError, never
from memsaver_server.integrations.vllm.engine_cores import ask_workers, processes

logger = logging.getLogger("memsaver")

#: Paths of vLLM's own that our routes replace: the service must see the calls of its sleep mode, and knows of a worker
#: that has ended before vLLM does.
REPLACED = frozenset({"/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory", "/health"})

#: Paths, or beginnings of paths, that need the device.
WORK = ("/v1/", "/v2/", "/inference/", "/generate", "/invocations", "/pooling", "/classify", "/score", "/rerank")


class AsyncClient:
    """vLLM's asynchronous engine client, for threads other than that of its loop."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    @property
    def processes(self) -> dict[str, int]:
        return processes(getattr(self._engine, "engine_core", None))

    def start(self, message: Plain) -> Future[list[Plain]]:
        return self._start(ask_workers(self._engine, message))

    def sleep(self, level: int) -> Future[None]:
        return self._start(self._engine.sleep(level, "keep"))

    def pause(self, mode: DrainMode, timeout_s: float, given_up: Callable[[], bool]) -> None:
        pausing = self._start(self._engine.sleep(0, mode))
        try:
            wait_for_pause(pausing, timeout_s, given_up, self.pending)
        except DrainTimeoutError:
            pausing.cancel()
            raise

    def wake_up(self, tags: list[str] | None) -> None:
        """Have vLLM resume ``tags``, all if None. Does not block."""
        self.run_scheduler(tags).add_done_callback(log_failure)

    def reset_prefix_cache(self) -> None:
        self._start(self._engine.reset_prefix_cache()).result()

    def forget_prefixes(self) -> None:
        """Have the prefix cache reset before vLLM looks at any request sent from now on. Does not block: of a large
        cache this takes several milliseconds."""
        self._start(self._engine.reset_prefix_cache()).add_done_callback(log_failure)

    def is_alive(self) -> bool:
        return not self._engine.errored

    def model_name(self) -> str:
        config = getattr(getattr(self._engine, "vllm_config", None), "model_config", None)
        return str(getattr(config, "model", ""))

    def run_scheduler(self, tags: list[str] | None) -> Future[None]:
        """As ``wake_up``; the result tells its end."""
        return self._start(self._engine.wake_up(tags))

    def generate(self, prompt: Sequence[int], count: int) -> Future[list[int]]:
        """Compute the ``count`` tokens that greedy decoding appends to ``prompt``, without cached prefixes."""

        async def generated() -> list[int]:
            await self._engine.reset_prefix_cache()
            tokens: list[int] = []
            request = {"prompt_token_ids": list(prompt)}
            async for output in self._engine.generate(request, greedy(count), f"memsaver-{uuid.uuid4().hex}"):
                tokens = list(output.outputs[0].token_ids)
            await self._engine.reset_prefix_cache()
            return tokens

        return self._start(generated())

    def pending(self) -> list[str]:
        """Return the names of the requests in flight."""
        states = getattr(getattr(self._engine, "output_processor", None), "request_states", {})
        return sorted(str(getattr(state, "external_req_id", name)) for name, state in list(states.items()))

    def _start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def greedy(count: int) -> Any:
    """Return vLLM's parameters for ``count`` tokens of greedy decoding."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def wait_for_pause(
    pausing: Future[Any], timeout_s: float, given_up: Callable[[], bool], pending: Callable[[], Sequence[str]]
) -> None:
    """Return once vLLM is paused.

    Raises:
        DrainTimeoutError: it was not in time, or the caller has given it up; names what is ``pending``.
    """
    deadline = time.monotonic() + timeout_s
    while not wait([pausing], max(0.0, min(DRAIN_POLL_S, deadline - time.monotonic()))).done:
        if given_up() or time.monotonic() >= deadline:
            raise DrainTimeoutError(timeout_s, pending())
    pausing.result()


def log_failure(done: Future[Any]) -> None:
    if not done.cancelled() and done.exception() is not None:
        logger.error("vLLM did not continue as it should after a wake-up: %s", done.exception())


class HttpAdmission:
    """Admission to vLLM's HTTP server. Requests inside are vLLM's to count, and to queue while it is paused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed: str | None = None
        self._hold = 0
        self._held: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        with self._lock:
            self._closed, self._hold = reason, hold

    def open_admission(self) -> None:
        with self._lock:
            self._closed = None
            held, self._held = self._held, {}
        for opened, loop in held.items():
            loop.call_soon_threadsafe(opened.set)

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
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
            opened = asyncio.Event()
            self._held[opened] = asyncio.get_running_loop()
        try:
            await opened.wait()
        finally:
            with self._lock:
                self._held.pop(opened, None)


class ClosedRoute(BaseRoute):
    """In front of all routes while admission is closed: requests that need the device wait here, or are refused."""

    def __init__(
        self, app: FastAPI, admission: HttpAdmission, refuse: Callable[[AdmissionClosedError], Response]
    ) -> None:
        self._app = app
        self._admission = admission
        self._refuse = refuse

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        work = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(WORK)
        return (Match.FULL if work and self._admission.is_closed else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._admission.enter()
        except AdmissionClosedError as closed:
            await self._refuse(closed)(scope, receive, send)
        else:
            await self._app.router(scope, receive, send)


class OverlayRoute(BaseRoute):
    """Our application in front of another: for paths that the other lacks, and those replaced."""

    def __init__(self, ours: FastAPI, theirs: FastAPI) -> None:
        self._app = ours
        self._theirs = list(theirs.routes)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        ours = _serves(self._app.routes, scope)
        if ours and (scope["path"] in REPLACED or not _serves(self._theirs, scope)):
            return Match.FULL, {}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _serves(routes: Sequence[BaseRoute], scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in routes)
