"""Serves vLLM: by routes in its API server (``register``, an entry point), or by an HTTP server beside an ``LLM``."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from memsaver_core.compat.patching import wrap, wrap_in
from memsaver_core.compat.vllm.allocator import is_wanted, switch
from memsaver_core.compat.vllm.tier import writes_weights
from memsaver_core.contract.errors import AdmissionClosedError, ConfigurationError, MemsaverError, UnsupportedError
from memsaver_core.contract.requests import SCHEDULING, MemoryRequest, Tagged
from memsaver_server import Attachment, Settings, attach, create_app
from memsaver_server.controller import Answer
from memsaver_server.engine.lifecycle import Lifecycle
from memsaver_server.http.auth import check_address
from memsaver_server.http.service import response_of
from memsaver_server.integrations.vllm.engine import ApiServerEngine, OfflineEngine

logger = logging.getLogger("memsaver")

#: vLLM's paths that our routes replace: the service must see a sleep, and knows before vLLM that a worker has ended.
REPLACED = frozenset({"/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory", "/health"})

#: Paths, or beginnings of paths, that need the device.
WORK = ("/v1/", "/v2/", "/inference/", "/generate", "/invocations", "/pooling", "/classify", "/score", "/rerank")


def register() -> None:
    """The entry point that vLLM calls in each of its processes. Does nothing if ``MEMSAVER_VLLM=0``."""
    if switch() is not False:
        one_more = {"load_endpoint_plugins": lambda load, *args, **named: [*load(*args, **named), RoutesPlugin()]}
        wrap_in("vllm.plugins", one_more)
        wrap_in("vllm.entrypoints.llm", {"LLM.sleep": _hibernating, "LLM.wake_up": _waking})


class RoutesPlugin:
    """An endpoint plugin: vLLM's interface for adding routes to its server."""

    name = "memsaver"
    required_tasks = None

    def __init__(self) -> None:
        self._app: FastAPI | None = None

    def attach_router(self, app: FastAPI) -> None:
        self._app = app

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Serve the routes if the engine sleeps by memsaver and the service may be served at vLLM's address."""
        model_config = getattr(getattr(engine_client, "vllm_config", None), "model_config", None)
        if self._app is None or not is_wanted(model_config):
            return
        settings = Settings()
        try:
            if (servers := getattr(args, "api_server_count", None) or 1) > 1:  # the kernel picks one for a request
                raise ConfigurationError(
                    f"vLLM has {servers} API servers, by default one for each data-parallel engine, and each would act "
                    "as the only one; start it with --api-server-count 1"
                )
            if not getattr(args, "uds", None):
                check_address(getattr(args, "host", None) or "0.0.0.0", settings)
        except ConfigurationError as error:
            logger.warning("memsaver's routes are not served: %s. Sleep mode itself works", error)
            return
        engine = await asyncio.to_thread(ApiServerEngine, engine_client, asyncio.get_running_loop())
        ours = create_app(engine, settings)
        self._app.router.routes[:0] = [ClosedRoute(self._app, engine), OverlayRoute(ours, self._app)]
        watch_updates(engine_client, ours.state.memsaver.controller.lifecycle)
        logger.info("memsaver's routes are served beside vLLM's own")


class ClosedRoute(BaseRoute):
    """The first route of all. While admission is closed, requests that need the device wait here, or are refused."""

    def __init__(self, app: FastAPI, engine: ApiServerEngine) -> None:
        self._app = app
        self._engine = engine

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        work = scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith(WORK)
        closed = work and (self._engine.is_closed or self._refusal(scope))
        return (Match.FULL if closed else Match.NONE), {}

    def _refusal(self, scope: Scope) -> str:
        return self._engine.refusal(scope["path"], Headers(scope=scope).get("X-data-parallel-rank"))

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if reason := self._refusal(scope):
                raise AdmissionClosedError(reason)
            await self._engine.enter()
        except AdmissionClosedError as closed:
            await response_of(Answer.failure(closed))(scope, receive, send)
        else:
            await self._app.router(scope, receive, send)


class OverlayRoute(BaseRoute):
    """Our application in front of another one, for paths that the other lacks or that are in ``REPLACED``."""

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


#: The attribute of an ``LLM`` that holds its ``OfflineEngine`` while its workers are hibernated.
_HIBERNATED = "_memsaver_hibernated"


def _hibernating(sleep: Callable[..., Any], llm: Any, level: int = 1, mode: str = "abort") -> Any:
    """``LLM.sleep``. Level 3 is level 1, after which the workers hibernate; if that fails, the ``LLM`` can generate."""
    if level != 3 or not is_wanted(getattr(llm.llm_engine, "model_config", None)):
        return sleep(llm, level, mode)
    engine = OfflineEngine(llm)
    sleep(llm, 0, mode)
    try:
        engine.memory.release(MemoryRequest(hibernate=True))
    except MemsaverError:
        engine.memory.close()
        llm.wake_up()
        raise
    setattr(llm, _HIBERNATED, engine)
    return None


def _waking(wake_up: Callable[..., Any], llm: Any, tags: list[str] | None = None) -> Any:
    """``LLM.wake_up``, which ends a hibernation first. If that fails, nothing has changed, and it can be repeated."""
    if (engine := vars(llm).get(_HIBERNATED)) is not None:
        engine.memory.resume(Tagged(tags=tuple(tag for tag in tags or () if tag != SCHEDULING)))
        engine.memory.close()
        delattr(llm, _HIBERNATED)
    return wake_up(llm, tags)


def attach_to(llm: Any, **options: Any) -> Attachment:
    """Serve a ``vllm.LLM`` from a thread of this process; ``options`` as for ``memsaver_server.attach``. Each call by
    which it generates is one request: a release waits for its end; while memory is released it waits or is refused.
    Raises UnsupportedError unless it was started with sleep mode, and MEMSAVER_VLLM=1 or the backend ``memsaver``."""
    engine = OfflineEngine(llm)
    if not engine.memory.enabled():
        raise UnsupportedError(
            "this engine does not sleep by memsaver: start it with enable_sleep_mode=True and MEMSAVER_VLLM=1, "
            "on a CUDA device"
        )
    engine.gate_calls()
    attachment = attach(engine, **options)
    watch_updates(llm, attachment.lifecycle)
    return attachment


def watch_updates(engine: Any, lifecycle: Lifecycle) -> None:
    """Have ``lifecycle`` note each ``collective_rpc`` of vLLM's client or ``LLM`` by whose name it writes weights.
    vLLM's own reload, its weight transfer and trainers' worker extensions all reach the workers by ``collective_rpc``.
    Nothing marks the last call of an update: the first counts as all. Callers wake the KV cache only after the last."""

    def watched(call: Callable[..., Any], method: Any, *args: Any, **kwargs: Any) -> Any:
        if not writes_weights(method):
            return call(method, *args, **kwargs)
        lifecycle.weights_updating()
        result = call(method, *args, **kwargs)
        if inspect.isawaitable(result):
            return noted(result)
        lifecycle.weights_updated()
        return result

    async def noted(writing: Awaitable[Any]) -> Any:
        result = await writing
        lifecycle.weights_updated()
        return result

    wrap(engine, "collective_rpc", watched, again=True)
