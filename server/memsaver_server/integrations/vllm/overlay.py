"""Routes in front of those of vLLM's HTTP application."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from memsaver_server.engine import AdmissionClosedError
from memsaver_server.integrations.vllm.api_server import HttpAdmission

#: Paths of vLLM's own sleep mode that our routes replace, as the service must see these calls.
REPLACED = frozenset({"/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory"})

#: Paths, or beginnings of paths, that need the device.
WORK = ("/v1/", "/v2/", "/inference/", "/generate", "/invocations", "/pooling", "/classify", "/score", "/rerank")


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
