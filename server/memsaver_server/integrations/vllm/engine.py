"""vLLM behind the engine port: in its API server's process, or beside an ``LLM``.

The memory is in vLLM's workers, where the plugin ``memsaver_core.compat.vllm`` holds it; they are reached by vLLM's own
``collective_rpc``. Requests are drained, frozen and set going again by vLLM's own pause and sleep.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from memsaver_core.compat.vllm.import_hooks import when_imported
from memsaver_core.compat.vllm.worker import asked_for, is_wanted
from memsaver_core.errors import ConfigurationError, UnsupportedError
from memsaver_server.app import create_app
from memsaver_server.attachment import Attachment, attach
from memsaver_server.engine import AdmissionClosedError, DrainMode, DrainTimeoutError
from memsaver_server.gate import Gate
from memsaver_server.http.auth import check_address
from memsaver_server.http.errors import error_response
from memsaver_server.ranks import Answer, RankMemory
from memsaver_server.settings import Settings

if TYPE_CHECKING:
    from memsaver_server.engine import Engine

logger = logging.getLogger("memsaver")

#: vLLM's name for what a wake-up without memory sets going.
SCHEDULING = ["scheduling"]

#: Paths of vLLM's own sleep mode, which ours answer in its place: what they do must pass by the service.
TAKEN_OVER = frozenset({"/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory"})

#: Paths that need the device. They begin with these, or are these.
WORK = ("/v1/", "/v2/", "/inference/", "/generate", "/invocations", "/pooling", "/classify", "/score", "/rerank")

#: What an ``LLM`` generates by.
CALLS = ("generate", "chat", "beam_search", "encode", "embed", "classify", "score", "reward", "wait_for_completion")


class _Client(Protocol):
    """What both kinds of vLLM's front ends can do, seen from a thread that may wait."""

    def ask(self, command: str, *arguments: Any) -> list[Answer]: ...

    def sleep(self, level: int) -> None: ...

    def pause(self, mode: DrainMode, timeout_s: float) -> None: ...

    def proceed(self, *, asleep: bool) -> None:
        """Set generation going; ``asleep`` where vLLM takes itself to be. Answers at once."""

    def reset_prefix_cache(self) -> None: ...

    def is_alive(self) -> bool: ...


class _Admission(Protocol):
    def close_admission(self, reason: str, *, hold: int = 0) -> None: ...

    def open_admission(self) -> None: ...

    def drain(self, timeout_s: float, mode: DrainMode = "wait") -> None: ...


class VllmEngine:
    """Implements ``Engine`` over vLLM. Made by ``attach_to`` and by the plugin."""

    name = "vllm"

    def __init__(self, client: _Client, admission: _Admission) -> None:
        self._client = client
        self._admission = admission
        self._asleep = False
        self._paused = False
        self.memory = RankMemory(_Sleeper(self))

    def is_alive(self) -> bool:
        return self._client.is_alive()

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self._admission.close_admission(reason, hold=hold)

    def open_admission(self) -> None:
        if self._paused or self._asleep:
            self._client.proceed(asleep=self._asleep)
        self._paused = self._asleep = False
        self._admission.open_admission()

    def drain(self, timeout_s: float, mode: DrainMode = "wait") -> None:
        self._admission.drain(timeout_s, mode)
        try:
            self._client.pause(mode, timeout_s)
        except DrainTimeoutError:
            if not self._paused:
                self._client.proceed(asleep=False)
            raise
        self._paused = True

    def flush_cache(self) -> None:
        self._client.reset_prefix_cache()

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """vLLM resets its caches when it goes to sleep, and computes frozen requests again; this is for the rest."""
        if "kv_cache" in lost:
            self._client.reset_prefix_cache()


class _Sleeper:
    """The ranks of an engine."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def ask(self, command: str, *arguments: Any) -> list[Answer]:
        return self._engine._client.ask(command, *arguments)

    def sleep(self, level: int) -> None:
        self._engine._asleep = True
        self._engine._client.sleep(level)


# -- in the API server -------------------------------------------------------------------------------------------------


class _AsyncClient:
    """vLLM's asynchronous engine client, for threads other than that of its loop."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    def ask(self, command: str, *arguments: Any) -> list[Answer]:
        answers: list[Answer] = self._wait(self._engine.collective_rpc("memsaver", args=(command, *arguments)))
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

    def proceed(self, *, asleep: bool) -> None:
        waking = self._start(self._engine.wake_up(None if asleep else SCHEDULING))
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
        logger.error("vLLM did not go on: %s", done.exception())


class HttpAdmission:
    """Who may enter vLLM's HTTP server. What is inside is vLLM's to count, and to queue while it is paused."""

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
        """Nobody is in flight here: a request that is let in is vLLM's."""

    async def enter(self) -> None:
        """Return when a request may enter.

        Raises:
            AdmissionClosedError: not now.
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


class _Closed(BaseRoute):
    """In front of all routes while admission is closed: work for the device waits here, or is refused."""

    def __init__(self, app: FastAPI, admission: HttpAdmission) -> None:
        self._app = app
        self._admission = admission

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        work = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(WORK)
        return (Match.FULL if work and self._admission.is_closed else Match.NONE), {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._admission.enter()
        except AdmissionClosedError as closed:
            problem = error_response(closed)
            await JSONResponse(problem.body(), problem.status, headers=problem.headers)(scope, receive, send)
        else:
            await self._app.router(scope, receive, send)


class _Overlay(BaseRoute):
    """Routes of ours in front of another application's: those that it does not have, and those taken over."""

    def __init__(self, ours: FastAPI, theirs: FastAPI) -> None:
        self._app = ours
        self._theirs = list(theirs.routes)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        ours = _serves(self._app.routes, scope)
        if ours and (scope["path"] in TAKEN_OVER or not _serves(self._theirs, scope)):
            return Match.FULL, {}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _serves(routes: Sequence[BaseRoute], scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in routes)


async def serve_in(app: FastAPI, engine_client: Any, settings: Settings) -> VllmEngine:
    """Serve ``engine_client`` inside vLLM's application ``app``, before that takes its first request."""
    admission = HttpAdmission()
    client = _AsyncClient(engine_client, asyncio.get_running_loop())
    engine = await asyncio.to_thread(VllmEngine, client, admission)
    app.router.routes[:0] = [_Closed(app, admission), _Overlay(create_app(engine, settings), app)]
    return engine


class RoutesPlugin:
    """vLLM's interface for whatever adds routes to its server: an endpoint plugin."""

    name = "memsaver"
    required_tasks = None

    def __init__(self) -> None:
        self._app: FastAPI | None = None

    def attach_router(self, app: FastAPI) -> None:
        self._app = app

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Serve the routes, where the engine sleeps by memsaver and the address is one that we serve on."""
        model_config = getattr(getattr(engine_client, "vllm_config", None), "model_config", None)
        if self._app is None or not is_wanted(model_config):
            return
        settings = Settings()
        try:
            if not getattr(args, "uds", None):
                check_address(getattr(args, "host", None) or "0.0.0.0", settings)
        except ConfigurationError as error:
            logger.warning("memsaver's routes are not served: %s. Sleep mode itself works", error)
            return
        await serve_in(self._app, engine_client, settings)
        logger.info("memsaver's routes are served with vLLM's own")


def register() -> None:
    """The entry point that vLLM calls in each of its processes. Does nothing where ``MEMSAVER_VLLM=0``."""
    if asked_for() is not False:
        when_imported("vllm.plugins", _serve_routes)


def _serve_routes(module: ModuleType) -> None:
    original: Callable[..., list[Any]] | None = getattr(module, "load_endpoint_plugins", None)
    if original is None or hasattr(original, "_memsaver_wraps"):
        return

    @functools.wraps(original)
    def load_endpoint_plugins(*args: Any, **kwargs: Any) -> list[Any]:
        return [*original(*args, **kwargs), RoutesPlugin()]

    load_endpoint_plugins._memsaver_wraps = original  # type: ignore[attr-defined]
    module.load_endpoint_plugins = load_endpoint_plugins  # type: ignore[attr-defined]


# -- beside an LLM -----------------------------------------------------------------------------------------------------


class _OfflineClient:
    """An ``LLM``, whose calls must not overlap; ``lock`` is held during each, generation included."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.lock = threading.Lock()

    def ask(self, command: str, *arguments: Any) -> list[Answer]:
        with self.lock:
            answers: list[Answer] = self._llm.collective_rpc("memsaver", args=(command, *arguments))
            return answers

    def sleep(self, level: int) -> None:
        with self.lock:
            self._llm.sleep(level, "keep")

    def pause(self, mode: DrainMode, timeout_s: float) -> None:
        with self.lock:
            self._llm.sleep(0, "keep" if mode == "wait" else mode)  # nobody generates any more

    def proceed(self, *, asleep: bool) -> None:
        with self.lock:
            self._llm.wake_up(None if asleep else SCHEDULING)

    def reset_prefix_cache(self) -> None:
        with self.lock:
            self._llm.reset_prefix_cache()

    def is_alive(self) -> bool:
        return not getattr(getattr(self._llm.llm_engine.engine_core, "resources", None), "engine_dead", False)


class _Gated(threading.local):
    inside = False


def attach_to(
    llm: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    uds: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
) -> Attachment:
    """Serve a ``vllm.LLM`` from a thread of this process: requests of its own go on as ever, and wait or are refused
    while memory is away.

    A call of ``llm.generate`` and its like is one request: a release waits for its end.

    Args:
        llm: started with sleep mode, with MEMSAVER_VLLM=1 or the backend ``memsaver``.
        host, port, uds, settings: as for ``memsaver_server.attach``.

    Raises:
        UnsupportedError: the engine does not sleep by memsaver.
        ConfigurationError: as for ``memsaver_server.attach``.
    """
    gate = Gate("vllm")
    client = _OfflineClient(llm)
    engine = VllmEngine(client, gate)
    if not engine.memory.enabled():
        raise UnsupportedError(
            "this engine does not sleep by memsaver: start it with enable_sleep_mode=True and MEMSAVER_VLLM=1, "
            "on a CUDA device"
        )
    _gate_calls(llm, gate, client.lock)
    return attach(engine, host=host, port=port, uds=uds, settings=settings)


def _gate_calls(llm: Any, gate: Gate, lock: threading.Lock) -> None:
    gated = _Gated()

    def through(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def enter(*args: Any, **kwargs: Any) -> Any:
            if gated.inside:  # one of these calls another
                return call(*args, **kwargs)
            with gate.request(name), lock:
                gated.inside = True
                try:
                    return call(*args, **kwargs)
                finally:
                    gated.inside = False

        return enter

    for name in CALLS:
        if hasattr(llm, name):
            setattr(llm, name, through(name, getattr(llm, name)))


if TYPE_CHECKING:
    _is_an_engine: Engine = VllmEngine(_OfflineClient(None), Gate())
