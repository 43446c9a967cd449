"""Serves vLLM: routes in its API server by vLLM's entry point, or an HTTP server beside an ``LLM``."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from memsaver_core.compat.vllm.config import is_wanted, switch
from memsaver_core.compat.vllm.import_hooks import when_imported, wrap
from memsaver_core.errors import ConfigurationError, UnsupportedError
from memsaver_server import Attachment, Settings, attach, create_app
from memsaver_server.engine import AdmissionClosedError
from memsaver_server.gate import Gate
from memsaver_server.http.auth import check_address
from memsaver_server.http.errors import error_response
from memsaver_server.integrations.vllm.api_server import AsyncClient, ClosedRoute, HttpAdmission, OverlayRoute
from memsaver_server.integrations.vllm.engine import VllmEngine
from memsaver_server.integrations.vllm.offline import OfflineClient, gate_calls
from memsaver_server.integrations.vllm.weight_updates import watch_updates

logger = logging.getLogger("memsaver")


def register() -> None:
    """The entry point that vLLM calls in each of its processes. Does nothing if ``MEMSAVER_VLLM=0``."""
    if switch() is not False:
        when_imported("vllm.plugins", lambda module: wrap(module, "load_endpoint_plugins", _load_endpoint_plugins))


def _load_endpoint_plugins(load: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
    return [*load(*args, **kwargs), RoutesPlugin()]


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
            _check_servers(args)
            if not getattr(args, "uds", None):
                check_address(getattr(args, "host", None) or "0.0.0.0", settings)
        except ConfigurationError as error:
            logger.warning("memsaver's routes are not served: %s. Sleep mode itself works", error)
            return
        await serve_in(self._app, engine_client, settings)
        logger.info("memsaver's routes are served beside vLLM's own")


def _check_servers(args: Any) -> None:
    """Raise ConfigurationError if vLLM's server has several processes, of which the kernel picks one for a request."""
    servers = getattr(args, "api_server_count", None) or 1
    if servers > 1:
        raise ConfigurationError(
            f"vLLM has {servers} API servers, by default one for each data-parallel engine, and each would act "
            "as the only one; start it with --api-server-count 1"
        )


async def serve_in(app: FastAPI, engine_client: Any, settings: Settings) -> VllmEngine:
    """Serve ``engine_client`` inside vLLM's application ``app``, before that takes its first request."""
    admission = HttpAdmission()
    client = AsyncClient(engine_client, asyncio.get_running_loop())
    engine = await asyncio.to_thread(VllmEngine, client, admission)
    ours = create_app(engine, settings)
    app.router.routes[:0] = [ClosedRoute(app, admission, _refusal), OverlayRoute(ours, app)]
    watch_updates(engine_client, ours.state.memsaver.lifecycle.weights_updated)
    return engine


def _refusal(closed: AdmissionClosedError) -> JSONResponse:
    response = error_response(closed)
    return JSONResponse(response.body(), response.status, headers=response.headers)


def attach_to(
    llm: Any,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    uds: str | os.PathLike[str] | None = None,
    settings: Settings | None = None,
) -> Attachment:
    """Serve a ``vllm.LLM`` from a thread of this process.

    A call of ``llm.generate`` and its like is one request: a release waits for its end, and while memory is released
    it waits or is refused.

    Args:
        llm: started with sleep mode, with MEMSAVER_VLLM=1 or the backend ``memsaver``.
        host, port, uds, settings: as for ``memsaver_server.attach``.

    Raises:
        UnsupportedError: the engine does not sleep by memsaver.
        ConfigurationError: as for ``memsaver_server.attach``.
    """
    gate = Gate("vllm")
    client = OfflineClient(llm)
    engine = VllmEngine(client, gate)
    if not engine.memory.enabled():
        raise UnsupportedError(
            "this engine does not sleep by memsaver: start it with enable_sleep_mode=True and MEMSAVER_VLLM=1, "
            "on a CUDA device"
        )
    gate_calls(llm, gate, client)
    attachment = attach(engine, host=host, port=port, uds=uds, settings=settings)
    watch_updates(llm, attachment.lifecycle.weights_updated)
    return attachment
