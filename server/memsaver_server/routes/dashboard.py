"""The dashboard: its page, and the feed of device memory and operations that it shows.

The page's files contain no data and need no key; the feed does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response, StreamingResponse

from memsaver_core.contract.errors import NotFoundError
from memsaver_server import clock
from memsaver_server.controller import TICK_S, Controller, Models
from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import guard
from memsaver_server.http.service import ControllerOf, event_stream

_FOLDER = files("memsaver_server") / "dashboard"
_TYPES = {"html": "text/html", "css": "text/css", "svg": "image/svg+xml"}
#: The page's files and their media types; a response adds the character set.
FILES = {each.name: _TYPES.get(each.name.rpartition(".")[2], "text/javascript") for each in _FOLDER.iterdir()}
HEADERS = {
    # Only this server's files and answers; no framing, against clickjacking.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
#: The longest interval between ``occupation`` events of the feed while idle, and during an operation, seconds.
IDLE_INTERVAL_S = 1.0
RUNNING_INTERVAL_S = 0.25
#: Operations that are sent to a new reader of the feed.
RECENT = 30


def router(_models: Models) -> APIRouter:
    routes = APIRouter(include_in_schema=False)  # not part of the API: the feed changes with the page

    @routes.get("/")
    async def page() -> Response:
        return _file("index.html")

    @routes.get("/dashboard/feed")
    @reads_only
    async def feed(controller: ControllerOf, _key: None = Depends(guard)) -> StreamingResponse:
        """Server-sent events: ``past`` samples once, then ``occupation`` each second and ``operation`` at each
        change."""
        return event_stream(_feed(controller))

    @routes.get("/dashboard/{name}")
    async def page_file(name: str) -> Response:
        if name not in FILES:
            raise NotFoundError(f"the dashboard has no file {name!r}")
        return _file(name)

    return routes


def _file(name: str) -> Response:
    return Response((_FOLDER / name).read_bytes(), media_type=FILES[name], headers=HEADERS)


async def _feed(controller: Controller[Any]) -> AsyncIterator[tuple[str, Any]]:
    yield "past", {"readings": list(controller.readings())}
    sent: dict[str, object] = {}
    due = 0.0
    while not controller.closing.is_set():
        recent = controller.operations.recent()[:RECENT]
        now: dict[str, object] = {
            each.id: (each.status, each.phase, len(each.phases), each.described()) for each in recent
        }
        for operation in reversed(recent):
            # The progress of a running one always changes.
            if operation.status in ("running", "prepared") or sent.get(operation.id) != now[operation.id]:
                phase_starts = list(operation.phase_starts)
                yield "operation", {**controller.describe(operation), "phase_starts": phase_starts}
        if now != sent or clock.monotonic() >= due:
            sent = now
            running = any(not each.has_ended for each in recent)
            due = clock.monotonic() + (RUNNING_INTERVAL_S if running else IDLE_INTERVAL_S)
            yield "occupation", await controller.shown()
        await asyncio.sleep(TICK_S)
