"""The state behind a fleet's routes. It has what ``http/`` needs of a service: settings, limits, counts of callers."""

from __future__ import annotations

import asyncio
import threading
import uuid
from typing import Annotated, Any, cast

from fastapi import Depends, Request
from fastapi.responses import JSONResponse

from memsaver_server.fleet.fleet import AsyncFleet
from memsaver_server.fleet.request import Verb
from memsaver_server.fleet.results import EngineStatus
from memsaver_server.fleet.serve.answers import operation_response
from memsaver_server.fleet.serve.broadcast import Broadcast, response_of
from memsaver_server.fleet.serve.fields import FleetReleaseFields, FleetResumeFields, SelectedFields
from memsaver_server.fleet.serve.metrics import FleetMetrics
from memsaver_server.fleet.serve.observer import Observer
from memsaver_server.fleet.serve.operations import Asked, FleetUnknownError, Operations, ServedOperation
from memsaver_server.fleet.turns.options import TurnOptions
from memsaver_server.fleet.turns.proxy import Proxy
from memsaver_server.fleet.turns.seat import member_of
from memsaver_server.fleet.turns.turns import Turns
from memsaver_server.fleet.turns.upstream import Upstreams
from memsaver_server.http.auth import caller
from memsaver_server.http.connection_limits import Connections
from memsaver_server.http.errors import NotFoundError
from memsaver_server.http.fairness import FairQueue
from memsaver_server.http.request_signing import NonceCache
from memsaver_server.log_output import relay
from memsaver_server.settings import Settings

#: Time for operations in progress when the service ends, seconds.
GRACE_S = 5.0
#: Fields of a fleet that an engine does not have.
_OURS = frozenset(("selector", "model", "fleet_mode", "operation_id", "wake_on_request", "run_async", "wait"))


class FleetService:
    """One fleet, served. Use it in one event loop, except ``close``."""

    def __init__(self, fleet: AsyncFleet, settings: Settings, turns: TurnOptions, engine_key: str | None) -> None:
        relay()
        self.fleet = fleet
        self.settings = settings
        self.connections = Connections()
        self.nonces = NonceCache()
        self.fair_queue = FairQueue()
        self.closing = threading.Event()
        self.observer = Observer(fleet, engine_key, lambda status: self.turns.update(status))
        self.operations = Operations(fleet, self.observer, settings.history, settings.drain_timeout_s)
        self.turns = self.operations.turns = Turns(turns, self.operations)
        self._upstreams = Upstreams()
        self.proxy = Proxy(self.turns, self.operations, self._upstreams, self.observer.keys)
        self._broadcast = Broadcast(self.observer, self._upstreams)
        self.metrics = FleetMetrics(self.observer, self.operations, self.turns, self.connections.figures)
        self._kept: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Look at the engines, and keep them as they are wanted from now on."""
        await self.observer.begin()
        self._kept = [asyncio.create_task(self.observer.keep()), asyncio.create_task(self.fleet.keep())]

    async def end(self) -> None:
        """End what ``start`` began. Operations in progress have ``GRACE_S``; another coordinator can carry them on."""
        for task in self._kept:
            task.cancel()
        await asyncio.gather(*self._kept, return_exceptions=True)
        self.turns.close()
        await self._upstreams.close()
        await asyncio.wait({asyncio.create_task(self.fleet.close())}, timeout=GRACE_S)

    def close(self) -> None:
        """End the streams that would keep a server from stopping. Safe in any thread."""
        self.closing.set()

    def engines_of(self, fields: SelectedFields) -> list[EngineStatus]:
        """Return the engines that a call is about.

        Raises:
            FleetUnknownError: the members cannot be read.
            NotFoundError: there are none.
        """
        if self.observer.trouble:
            raise FleetUnknownError(self.observer.trouble)
        selector = fields.selected()
        engines = [engine for engine in self.observer.status.engines if selector.matches(member_of(engine))]
        if not engines:
            raise NotFoundError(f"no engine of the fleet matches {selector.model_dump(exclude_defaults=True)}")
        return engines

    async def operate(self, request: Request, fields: FleetReleaseFields | FleetResumeFields) -> ServedOperation:
        """Start a release or a resume, or join it; wait for its end unless ``fields.run_async``.

        Raises:
            FleetConflictError, KeyReusedError: as Operations.start.
        """
        header = request.headers.get("idempotency-key")
        key = fields.operation_id or (uuid.uuid5(uuid.NAMESPACE_URL, header).hex[:12] if header else None)
        operation = self.operations.start(self._asked(fields), client=caller(request), key=key, wait=fields.wait)
        if not fields.run_async:
            await operation.ended()
        return operation

    async def answer(self, request: Request, fields: FleetReleaseFields | FleetResumeFields) -> JSONResponse:
        """Return the response to a release or a resume, or to a dry run of it."""
        if fields.dry_run:
            return await self.plan(fields)
        return operation_response(await self.operate(request, fields), run_async=fields.run_async)

    async def plan(self, fields: FleetReleaseFields | FleetResumeFields) -> JSONResponse:
        """Return the response to a dry run: what every engine would do."""
        verb = _verb(fields)
        sent = fields.model_dump(exclude_unset=True, exclude=set(_OURS))
        rows = await self._broadcast.call(
            self.engines_of(fields), "POST", f"/{verb}_memory_occupation", {**sent, "dry_run": True}, {}
        )
        blockers = [f"{row['name']}: {each}" for row in rows for each in _blockers(row)]
        about = {"dry_run": True, "operation": verb, "blockers": blockers}
        return response_of(rows, f"dry run: {verb} is {'not ' if blockers else ''}possible", about)

    async def call(
        self,
        fields: SelectedFields,
        done: str,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | None = None,
        query: dict[str, Any] | None = None,
    ) -> JSONResponse:
        """Send the same call to every selected engine; return the response that lists their answers.

        Args:
            done: what it says if all succeed.

        Raises:
            As engines_of.
        """
        rows = await self._broadcast.call(self.engines_of(fields), method, path, body, query or {})
        await self.observer.look([row["name"] for row in rows])
        return response_of(rows, done)

    def _asked(self, fields: FleetReleaseFields | FleetResumeFields) -> Asked:
        wakes = isinstance(fields, FleetReleaseFields) and fields.wake_on_request
        timeout_s = fields.timeout_s if isinstance(fields, FleetReleaseFields) else None
        return Asked(
            _verb(fields),
            fields.selected(),
            tuple(sorted(set(fields.tags))) if fields.tags else None,
            fields.fleet_mode,
            self.settings.drain_timeout_s if timeout_s is None else timeout_s,
            fields.options(),
            wakes,
        )


def _verb(fields: FleetReleaseFields | FleetResumeFields) -> Verb:
    return "release" if isinstance(fields, FleetReleaseFields) else "resume"


def _blockers(row: dict[str, Any]) -> list[str]:
    return list(row["body"].get("blockers", ())) if isinstance(row["body"], dict) else []


async def _service(request: Request) -> FleetService:
    return cast(FleetService, request.app.state.memsaver)


FleetServiceOf = Annotated[FleetService, Depends(_service)]
