"""The dashboard of a fleet: the page of one engine, with a row for each engine and one chart for all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Depends
from fastapi.responses import StreamingResponse

from memsaver_server.fleet.serve.answers import occupation, operation_status, total
from memsaver_server.fleet.serve.service import FleetService, FleetServiceOf
from memsaver_server.http.auth import reads_only
from memsaver_server.http.requests import guard
from memsaver_server.http.serializers import event
from memsaver_server.http.service import event_stream
from memsaver_server.routes.dashboard import IDLE_INTERVAL_S, RECENT, RUNNING_INTERVAL_S, TICK_S, page, page_file

# Not part of the API: the feed changes with the page.
router = APIRouter(include_in_schema=False)
router.add_api_route("/", page)


@router.get("/dashboard/feed")
@reads_only
async def feed(service: FleetServiceOf, _key: None = Depends(guard)) -> StreamingResponse:
    """The events of an engine's feed."""
    return event_stream(_feed(service))


router.add_api_route("/dashboard/{name}", page_file)


async def _feed(service: FleetService) -> AsyncIterator[str]:
    readings = [{"at": each.at, "used_bytes": {0: each.used_bytes}} for each in service.observer.readings]
    yield event("past", {"readings": readings})
    sent: dict[str, tuple[str, str, dict[str, str]]] = {}
    due = 0.0
    while not service.closing.is_set():
        recent = [operation_status(each, service.operations) for each in service.operations.recent()[:RECENT]]
        now = {each["operation_id"]: (each["status"], each["phase"], each["engines"]) for each in recent}
        for each in reversed(recent):
            if each["status"] == "running" or sent.get(each["operation_id"]) != now[each["operation_id"]]:
                yield event("operation", {**each, "phase_starts": [each["started_at"]] if each["phase"] else []})
        if now != sent or time.monotonic() >= due:
            running = any(each["status"] == "running" for each in recent)
            sent, due = now, time.monotonic() + (RUNNING_INTERVAL_S if running else IDLE_INTERVAL_S)
            whole = occupation(service.observer, service.operations, service.turns.in_flight())
            at = service.observer.readings[-1].at if service.observer.readings else time.time()
            yield event("occupation", {"at": at, **whole, "devices": total(whole["devices"])})
        await asyncio.sleep(TICK_S)
