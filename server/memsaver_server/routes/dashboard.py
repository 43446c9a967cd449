"""The dashboard: its page, and the feed of device memory and operations that it shows.

The page's files contain no data and need no key; the feed does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Depends
from fastapi.responses import Response, StreamingResponse

from memsaver_server.device_monitor import Sample
from memsaver_server.http.auth import reads_only
from memsaver_server.http.errors import NotFoundError
from memsaver_server.http.requests import ServiceOf, guard
from memsaver_server.http.serializers import event, occupation_answer, operation_status
from memsaver_server.http.service import Service, event_stream

# Not part of the API: the feed changes with the page.
router = APIRouter(include_in_schema=False)

_SCRIPTS = (
    *("backup", "chart", "communicators", "devices", "engines", "feed", "format", "operations", "page", "ranks"),
    *("tags", "timeline"),
)
#: The page's files and their media types.
FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **{f"{name}.js": "text/javascript; charset=utf-8" for name in _SCRIPTS},
}
HEADERS = {
    # Only this server's files and answers; no framing, against clickjacking.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
#: Poll interval of the feed, and its longest interval between ``occupation`` events while idle and during an operation.
#: Seconds.
TICK_S = 0.1
IDLE_INTERVAL_S = 1.0
RUNNING_INTERVAL_S = 0.25
#: Operations that are sent to a new reader of the feed.
RECENT = 30


@router.get("/")
async def page() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/dashboard/feed")
@reads_only
async def feed(service: ServiceOf, _key: None = Depends(guard)) -> StreamingResponse:
    """Server-sent events: ``past`` samples once, then ``occupation`` each second and ``operation`` at each change."""
    return event_stream(_feed(service))


@router.get("/dashboard/{name}")
async def page_file(name: str) -> Response:
    """A file of the page."""
    if name not in FILES:
        raise NotFoundError(f"the dashboard has no file {name!r}")
    return _file(name)


def _file(name: str) -> Response:
    content = (files("memsaver_server") / "dashboard" / name).read_bytes()
    return Response(content, media_type=FILES[name], headers=HEADERS)


async def _feed(service: Service) -> AsyncIterator[str]:
    yield event("past", {"readings": [_used(sample) for sample in service.monitor.history()]})
    sent: dict[str, tuple[str, str, int]] = {}
    due = 0.0
    while not service.closing.is_set():
        recent = service.lifecycle.operations.recent()[:RECENT]
        now: dict[str, tuple[str, str, int]] = {each.id: (each.status, each.phase, len(each.phases)) for each in recent}
        for operation in reversed(recent):
            # The progress of a running one always changes.
            if operation.is_running or sent.get(operation.id) != now[operation.id]:
                yield event("operation", {**operation_status(operation), "phase_starts": list(operation.phase_starts)})
        if now != sent or time.monotonic() >= due:
            sent = now
            due = time.monotonic() + (RUNNING_INTERVAL_S if service.lifecycle.operations.running else IDLE_INTERVAL_S)
            sample = await service.monitor.fresh()
            occupation = occupation_answer(service.lifecycle, service.engine, sample)
            yield event("occupation", {"at": sample.at, **occupation})
        await asyncio.sleep(TICK_S)


def _used(sample: Sample) -> dict[str, Any]:
    return {"at": sample.at, "used_bytes": {device.index: device.used_bytes for device in sample.devices}}
