"""The operator's page: what holds the memory, over time and now, and the feed that it lives on.

The page and its files hold no data and are open to everybody; the feed asks for the key like everything else.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response, StreamingResponse

from memsaver_server.device_monitor import Reading
from memsaver_server.http.errors import NotFoundError
from memsaver_server.http.requests import ServiceOf, guard
from memsaver_server.http.serializers import occupation_answer, operation_status
from memsaver_server.http.service import Service
from memsaver_server.operation_queue import Operation

# Not part of the API: the feed changes with the page.
router = APIRouter(include_in_schema=False)

#: The page's files, all of them, and what they are.
FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    "page.js": "text/javascript; charset=utf-8",
    "chart.js": "text/javascript; charset=utf-8",
    "feed.js": "text/javascript; charset=utf-8",
    "format.js": "text/javascript; charset=utf-8",
    "operations.js": "text/javascript; charset=utf-8",
}
HEADERS = {
    # Nothing but this server's own files and answers; nobody may frame the page and lend it somebody's clicks.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
#: How often the feed looks for news, and at least says what is occupied: at rest, and while memory moves. Seconds.
TICK_S = 0.1
BEAT_S = 1.0
RUNNING_BEAT_S = 0.25
#: Operations that a new reader of the feed is told of.
RECENT = 30


@router.get("/")
async def page() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/dashboard/feed")
async def feed(service: ServiceOf, _key: None = Depends(guard)) -> StreamingResponse:
    """Server-sent events: ``past`` readings once, then ``occupation`` each second and ``operation`` as one moves."""
    return StreamingResponse(_feed(service), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@router.get("/dashboard/{name}")
async def page_file(name: str) -> Response:
    """What the page is made of."""
    if name not in FILES:
        raise NotFoundError(f"the dashboard has no file {name!r}")
    return _file(name)


def _file(name: str) -> Response:
    content = (files("memsaver_server") / "dashboard" / name).read_bytes()
    return Response(content, media_type=FILES[name], headers=HEADERS)


async def _feed(service: Service) -> AsyncIterator[str]:
    yield _event("past", {"readings": [_used(reading) for reading in service.readings.past()]})
    told: dict[str, tuple[str, str, int]] = {}
    beat_at = 0.0
    while not service.closing.is_set():
        recent = service.occupation.operations.recent()[:RECENT]
        marks: dict[str, tuple[str, str, int]] = {
            each.id: (each.status, each.phase, len(each.phases)) for each in recent
        }
        for operation in reversed(recent):
            # One that runs moves bytes all the time.
            if operation.status == "running" or told.get(operation.id) != marks[operation.id]:
                yield _event("operation", _told(operation))
        if marks != told or time.monotonic() >= beat_at:
            told = marks
            beat_at = time.monotonic() + (RUNNING_BEAT_S if service.occupation.operations.running else BEAT_S)
            reading = await service.readings.fresh()
            occupied = occupation_answer(service.occupation, service.engine.name, reading)
            yield _event("occupation", {"at": reading.at, **occupied})
        await asyncio.sleep(TICK_S)


def _used(reading: Reading) -> dict[str, Any]:
    return {"at": reading.at, "used_bytes": {device.index: device.used_bytes for device in reading.devices}}


def _told(operation: Operation) -> dict[str, Any]:
    return {**operation_status(operation), "phase_starts": list(operation.phase_starts)}


def _event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"
