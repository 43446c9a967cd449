"""The controller of a fleet: its operations, its engines as last seen, and calls that every selected engine gets."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

from pydantic import ValidationError

from memsaver_core.contract import errors
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.reports import FleetPlanAnswer, PlanAnswer
from memsaver_core.contract.requests import (
    ASKED_OF_FLEET,
    OPPOSITE,
    SCHEDULING,
    Asked,
    AskedOfFleet,
    DrainMode,
    Fields,
    FleetRelease,
    FleetResume,
    Selected,
    Selector,
    Verb,
)
from memsaver_core.contract.status import HealthAnswer
from memsaver_server.audit import AuditLog
from memsaver_server.client.requests import path_of
from memsaver_server.controller import Answer, Capability, Controller, EngineState, Models
from memsaver_server.fleet import results
from memsaver_server.fleet.broadcast import answer_of, call_each
from memsaver_server.fleet.budget import Place, add_needs
from memsaver_server.fleet.fleet import AsyncFleet
from memsaver_server.fleet.metrics import FleetMetrics
from memsaver_server.fleet.observer import Observer, total
from memsaver_server.fleet.operation import FleetOperation
from memsaver_server.fleet.record import version_for
from memsaver_server.fleet.turns.options import TurnOptions
from memsaver_server.fleet.turns.proxy import Proxy
from memsaver_server.fleet.turns.turns import Turns
from memsaver_server.fleet.turns.upstream import Upstreams
from memsaver_server.log_output import relay
from memsaver_server.metrics import CallerFigures
from memsaver_server.operation.history import History
from memsaver_server.settings import Settings

#: Who asks for the operations of the turns.
TURNS = "turns"
#: Time for operations in progress when the service ends, seconds.
GRACE_S = 5.0


class FleetController(Controller[FleetOperation]):
    capabilities: frozenset[Capability] = frozenset({"update", "models"})
    models = Models(
        release=FleetRelease,
        resume=FleetResume,
        selected=Selected,
        done=results.FleetResult | results.CallAnswer,
        message=results.CallAnswer,
        written=results.CallAnswer,
        occupation=results.FleetOccupationAnswer,
        operation=results.FleetOperationStatusAnswer,
        operations=results.FleetOperationsAnswer,
        generates=results.CallAnswer,
        several=True,
        failures={
            404: "No engine of the fleet matches, or one does not have the call.",
            502: "An engine does not answer.",
        },
    )

    def __init__(self, fleet: AsyncFleet, settings: Settings, turns: TurnOptions, engine_key: str | None) -> None:
        relay()
        self.closing = threading.Event()
        self.callers = CallerFigures()
        self._fleet = fleet
        self._settings = settings
        self._observer = Observer(fleet, engine_key)
        self.turns = Turns(turns, self._observer, self.move)
        self._upstreams = Upstreams(fleet.verify)
        self.proxy = Proxy(self.turns, self._observer, self._upstreams)
        self._metrics = FleetMetrics(self._observer, self.turns, self.callers)
        self._audit = AuditLog(settings.audit_file)
        self.operations = fleet.history = History(settings.history)
        fleet.around, fleet.on_ended = self._around, self._record
        self._kept: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Look at the engines, and keep them as they are wanted from now on."""
        await self._observer.look()
        self._kept = [asyncio.create_task(self._observer.keep()), asyncio.create_task(self._fleet.keep())]

    def close(self) -> None:
        self.closing.set()

    async def end(self) -> None:
        """End what ``start`` began. Operations in progress have ``GRACE_S``; another coordinator can carry them on."""
        for task in self._kept:
            task.cancel()
        await asyncio.gather(*self._kept, return_exceptions=True)
        self.turns.close()
        await self._upstreams.close()
        await asyncio.wait({asyncio.create_task(self._fleet.close())}, timeout=GRACE_S)
        self._audit.close()

    # -- operations ----------------------------------------------------------------------------------------------------

    async def submit(self, asked: Asked, *, client: str, key: str | None) -> FleetOperation:
        assert isinstance(asked, AskedOfFleet)
        asked = asked.resolved(self._settings.drain_timeout_s)
        named = asked.operation_id or (uuid.uuid5(uuid.NAMESPACE_URL, key).hex[:12] if key else "")
        await self._fleet.check(asked, named, None if asked.operation_id else key)
        return self._start(asked, client, named)

    def _start(self, asked: AskedOfFleet, client: str, named: str = "") -> FleetOperation:
        """Begin an operation, or join an equal one that runs. ``named`` is the id that the caller gave, if any: a
        repeat with it gets the same operation, unless that failed. Raises ConflictError if the opposite runs on some of
        the engines, unless ``asked.wait``."""
        if (known := self._fleet.known(asked, named)) is not None:
            return known
        callers = [each for each in self.operations.running() if each.origin == "caller"]
        running = [each for each in callers if (each.request.operation in OPPOSITE) == (asked.operation in OPPOSITE)]
        if not named and running and running[-1].join(asked):
            return running[-1]
        # Those of turns and of the reconciler are not among them: they end soon.
        opposed = next((each for each in running if self._opposes(asked, each)), None)
        if opposed is not None and not asked.wait:
            raise errors.ConflictError(
                f"cannot {asked.operation}: {opposed.request.operation} {opposed.id} of the fleet is in progress "
                f"on some of these engines. Try again when it is done{errors.OR_WAIT}"
            )
        origin: results.Origin = "turns" if client == TURNS else "caller"
        return self._fleet.start(FleetOperation.of(asked, named, client, origin))

    async def attend(self, operation: FleetOperation, *, prepared: bool) -> None:
        await operation.ended()

    def answer(self, operation: FleetOperation) -> Answer:
        result = operation.report
        if result is None:
            assert operation.error is not None
            about = {"operation": operation.request.operation, "operation_id": operation.id, "engines": []}
            return Answer.failure(operation.error).of_operation(**about)
        done = Answer.of(result)
        if result.success:
            return done
        cancelled = operation.status == "cancelled"
        kind = "cancelled" if cancelled else next((each.kind for each in result.failed if each.kind), "failed")
        status = 409 if cancelled else next((errors.status_of(each.kind) for each in result.failed), 500)
        rows = [{"name": each.name, "type": each.kind, "message": each.error} for each in result.failed]
        failed = Answer.error(status, kind, result.message, 1 if status == 503 else None, failed=rows)
        return failed.of_operation(**done.body)

    async def commit(self, operation: FleetOperation, key: str | None = None) -> None:
        message = f"{operation.request.operation} {operation.id} cannot be committed"
        raise errors.LeaseEndedError(f"{message}: a fleet prepares and commits by itself", operation.id)

    async def cancel(self, operation: FleetOperation, by: str, key: str | None = None, *, force: bool = False) -> None:
        if operation.status == "cancelled":
            return
        try:
            await self._fleet.cancel(operation.id)
        except results.FleetError as error:
            raise errors.TooLateToCancelError(str(error)) from None
        await operation.ended()
        operation.advance("cancel")  # refused if it was too late all the same

    async def plan(self, asked: Asked) -> Answer:
        assert isinstance(asked, AskedOfFleet)
        verb = asked.operation
        body = {**asked.sent(), "dry_run": True}
        engines = self._engines_of(asked)
        rows = await call_each(engines, self._upstreams, self._observer, "POST", path_of(verb), body=body)
        said = {row.name: row.body.get("blockers", ()) for row in rows if isinstance(row.body, dict)}
        blockers = [f"{name}: {each}" for name, found in said.items() if isinstance(found, list) for each in found]
        if verb in OPPOSITE and not asked.patience_s(Phase.WAIT_FOR_MEMORY):
            blockers += _shortages(engines, rows)
        done = f"dry run: {verb} is {'not ' if blockers else ''}possible"
        plan = FleetPlanAnswer(message=done, operation=verb, blockers=tuple(blockers))
        return answer_of(rows, done, plan.model_dump(exclude={"message"}))

    @asynccontextmanager
    async def _around(self, operation: FleetOperation) -> AsyncIterator[None]:
        """Send no request to engines that the block moves; read their states after it."""
        if operation.origin == "turns":  # they have set their engines aside themselves
            yield
            return
        names = [part.member.name for part in operation.parts]
        async with self.turns.set_aside(names if operation.request.operation in OPPOSITE else ()):
            try:
                yield
            finally:
                await self._observer.look(names)

    def _record(self, operation: FleetOperation) -> None:
        is_done = operation.status == "succeeded"
        outcome = "success" if is_done else self.answer(operation).body["error"]["type"]
        counted = self._metrics.reconciled if operation.origin == "reconciler" else self._metrics.operations
        counted[operation.request.operation, outcome] += 1
        self._audit.record(operation, outcome)

    def _opposes(self, asked: AskedOfFleet, running: FleetOperation) -> bool:
        if asked.operation == running.request.operation:
            return False
        mine, theirs = asked.selected(), running.asked.selected()
        return any(mine.may_match(each) and theirs.may_match(each) for each in self._observer.members.values())

    async def move(self, verb: Verb, names: Sequence[str], **options: Any) -> results.FleetResult:
        """Move the memory of engines whose models take turns."""
        asked = ASKED_OF_FLEET[verb](selector=Selector(names=tuple(names)), wait=True, **options)
        return await self._start(asked.resolved(self._settings.drain_timeout_s), TURNS).outcome()

    # -- state ---------------------------------------------------------------------------------------------------------

    async def occupation(self, coordinator: str = "") -> dict[str, Any]:
        await self._observer.glance()
        return self._occupation().model_dump(mode="json")

    async def rows(self, selected: Fields | None) -> Sequence[EngineState]:
        await self._observer.glance()
        engines = self._observer.status.engines if selected is None else self._engines_of(selected)
        return [_row(engine) for engine in engines]

    def health(self, *, ready: bool) -> HealthAnswer:
        answers = any(engine.alive for engine in self._observer.status.engines)
        reason = (self._observer.trouble or ("" if answers else "no engine answers")) if ready else ""
        state = self._observer.status.state
        return HealthAnswer(status="unavailable" if reason else "ok", state=state, reason=reason)

    async def generates(self) -> Answer:
        return await self._call(Selected(), "A token was generated", "GET", "/health_generate")

    def scrape(self) -> bytes:
        return self._metrics.scrape()

    def _occupation(self) -> results.FleetOccupationAnswer:
        moving = (each.id for each in self._fleet.history.running() if each.request.operation in OPPOSITE)
        return self._observer.occupation(next(moving, None), self.turns.in_flight())

    # -- the dashboard -------------------------------------------------------------------------------------------------

    def readings(self) -> Iterable[dict[str, Any]]:
        return self._observer.readings

    async def shown(self) -> dict[str, Any]:
        now = self._occupation()
        at = self._observer.readings[-1]["at"] if self._observer.readings else time.time()
        return {"at": at, **now.model_dump(mode="json"), "devices": total(now.devices)}

    # -- calls of every engine -----------------------------------------------------------------------------------------

    async def pause(
        self, selected: Fields, mode: DrainMode, timeout_s: float | None, *, asleep: bool = False
    ) -> Answer:
        asked = {"mode": mode, **({} if timeout_s is None else {"timeout_s": timeout_s})}
        if asleep:
            query = {"level": 0, **asked}
            return await self._call(selected, "Scheduling paused", "POST", "/sleep", query=query)
        return await self._call(selected, "Generation paused", "POST", "/pause_generation", body=asked)

    async def continue_(self, selected: Fields, *, scheduling: bool = False) -> Answer:
        if scheduling:
            query = {"tags": [SCHEDULING]}
            return await self._call(selected, "Scheduling continues", "POST", "/wake_up", query=query)
        return await self._call(selected, "Generation continues", "POST", "/continue_generation", body={})

    async def kv_cache(self) -> Answer:
        raise errors.BadRequestError("a fleet has no KV cache; ask its engines")

    async def flush(self, selected: Fields) -> Answer:
        return await self._call(selected, "Cache flushed", "POST", "/flush_cache")

    async def written(self, selected: Fields, tags: Sequence[str], version: str | None) -> Answer:
        body = {**({"tags": list(tags)} if tags else {}), **({"weights_version": version} if version else {})}
        return await self._call(selected, "Content counts as written", "POST", "/content_written", body=body)

    async def update(self, selected: Fields, asked: Fields, source: Literal["disk", "tensor"]) -> Answer:
        # Engines of whose weights callers demand a version get no request until that is known anew.
        demands = self._observer.status.demands
        demanded = [each.name for each in self._engines_of(selected) if version_for(each, demands)]
        async with self.turns.set_aside(demanded):
            path = f"/update_weights_from_{source}"
            return await self._call(selected, "Weights written", "POST", path, body=asked.model_dump())

    async def _call(self, selected: Fields, done: str, method: str, path: str, **sent: dict[str, Any]) -> Answer:
        """Send the same call to every selected engine; return the answer that lists theirs, and says ``done`` if all
        succeed. Raises FleetUnknownError if the members cannot be read, NotFoundError if no engine is selected."""
        engines = self._engines_of(selected)
        try:
            rows = await call_each(engines, self._upstreams, self._observer, method, path, **sent)
        finally:
            await self._observer.look([engine.name for engine in engines])
        return answer_of(rows, done)

    def _engines_of(self, fields: Fields) -> list[results.EngineStatus]:
        """Return the engines that a call is about; raises as ``_call``."""
        assert isinstance(fields, Selected)
        if self._observer.trouble:
            raise errors.FleetUnknownError(self._observer.trouble)
        selector = fields.selected()
        engines = [engine for engine in self._observer.status.engines if selector.matches(engine)]
        unknown = sorted(set(selector.names) - self._observer.members.keys())
        results.NoEngineError.check(selector, engines, unknown)
        return engines


def _row(engine: results.EngineStatus) -> EngineState:
    now = engine.occupation
    return EngineState(
        name=engine.name,
        url=engine.url,
        state=engine.state,
        asleep=now is None or not now.admission.open,
        released=tuple(sorted(tag.tag for tag in engine.tags if tag.released_bytes)),
        tags=frozenset(tag.tag for tag in engine.tags),
    )


def _shortages(engines: Sequence[results.EngineStatus], rows: Sequence[results.CallRow]) -> list[str]:
    """Return for which GPUs and disks the engines' plans do not fit together."""
    places: dict[str, Place] = {}
    plans = {row.name: row.body for row in rows if row.success and isinstance(row.body, dict)}
    for engine in engines:
        if engine.occupation is not None and engine.name in plans:
            with suppress(ValidationError):  # of an engine whose answers are odd
                plan = PlanAnswer.model_validate(plans[engine.name])
                add_needs(places, engine.name, engine.occupation, plan.devices)
                if plan.file.disk:
                    where = f"disk {plan.file.disk} of host {engine.occupation.host_id}"
                    places.setdefault(where, Place(plan.file.free_bytes)).add(engine.name, plan.file)
    return [place.shortage(where) for where, place in places.items() if place.is_short]
