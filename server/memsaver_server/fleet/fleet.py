"""The coordinator: releases and resumes the engines of a fleet, all of them or none."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from pydantic import ValidationError
from typing_extensions import Unpack

from memsaver_core.contract.errors import ServerEndsError
from memsaver_core.contract.requests import (
    DEFAULT_LEASE_S,
    DEFAULT_SILENCE_S,
    FLEET_TIMEOUT_S,
    AskedOfFleet,
    DrainMode,
    FleetMode,
    FleetRelease,
    FleetResume,
    Selector,
    acts_of,
)
from memsaver_server.client.keywords import FleetReleaseKeywords, FleetResumeKeywords
from memsaver_server.fleet.connection import Coordinator, EngineFailure
from memsaver_server.fleet.execution import Execution
from memsaver_server.fleet.locks import of_cache
from memsaver_server.fleet.members import Member, Membership
from memsaver_server.fleet.operation import FleetOperation
from memsaver_server.fleet.parts import UNDONE, Part
from memsaver_server.fleet.reconciler import Reconciler
from memsaver_server.fleet.record import (
    Keeper,
    Known,
    MemoryRecord,
    Record,
    RecordContent,
    RecordError,
    Running,
    kept_released,
    version_for,
)
from memsaver_server.fleet.results import (
    EngineResult,
    FleetError,
    FleetEvent,
    FleetProgress,
    FleetResult,
    FleetStatus,
    NoEngineError,
)
from memsaver_server.fleet.roster import Roster
from memsaver_server.fleet.watching import Hub
from memsaver_server.operation.history import History, reused
from memsaver_server.wrong_fields import wrong_fields

logger = logging.getLogger("memsaver")

#: Finished operations that are remembered.
_HISTORY = 64


class AsyncFleet(AbstractAsyncContextManager["AsyncFleet"]):
    """Coordinates the engines of a membership. Use it in one event loop. Only one may use a record.

    It is not the source of truth: the engines report what they are, the record has what is wanted. Operations
    that share an engine or a GPU run one after another, others side by side.

    Args:
        membership: lists the engines.
        record: what is wanted, and how far operations are. By default it is kept in memory only.
        api_key: the key of the engines without ``Member.api_key``.
        lease_s: how long an engine stays prepared without this coordinator, seconds.
        silence_s: an engine that does not answer for so long counts as unreachable, seconds.
        verify: as for the client.
        name: engines report this coordinator as ``memsaver-coordinator NAME``; by default host and process.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        record: Record | None = None,
        api_key: str | None = None,
        lease_s: float = DEFAULT_LEASE_S,
        silence_s: float = DEFAULT_SILENCE_S,
        verify: ssl.SSLContext | bool = True,
        name: str = "",
    ) -> None:
        self.membership = membership
        name = name or f"{socket.gethostname()}:{os.getpid()}"
        self.verify = ssl.create_default_context() if verify is True else verify
        self._coordinator = Coordinator(f"memsaver-coordinator {name}", api_key, silence_s, lease_s, self.verify)
        self._keeper = Keeper(record or MemoryRecord())
        self.roster = Roster(membership, self._coordinator)
        self.hub = Hub(self.roster)
        self.history: History[FleetOperation] = History(_HISTORY)
        #: Called with each operation that has ended, unless it only repeats one that succeeded.
        self.on_ended: Callable[[FleetOperation], None] = lambda _: None
        self._recovering = asyncio.Lock()
        self._left: dict[str, Running] | None = None  # what another coordinator had begun; None: not read yet
        self._recoveries: dict[str, FleetOperation] = {}  # those of ``_left`` that are being brought to an end
        self._reconciler = Reconciler(self.roster, self._keeper, self.hub, self._reconciled)
        #: Entered while an operation may move memory, and left after it.
        self.around: Callable[[FleetOperation], AbstractAsyncContextManager[None]] = lambda _: nullcontext()

    async def release(
        self,
        selector: Selector | None = None,
        *,
        tags: Sequence[str] | None = None,
        operation_id: str | None = None,
        **options: Unpack[FleetReleaseKeywords],
    ) -> FleetResult:
        """Release the device memory of ``tags`` (None: of all) on the selected engines.

        A caller that is cancelled cancels nothing: the operation continues. ``cancel`` does.

        Args:
            operation_id: the id of this operation; a repeat with the same id carries out only what has failed, and does
                nothing if a later operation was about one of its engines.
            options: the other fields of ``memsaver_core.contract.requests.FleetRelease``; by default ``timeout_s`` is
                60. With ``fleet_mode`` ``all`` (the default) all engines prepare, then commit; if one fails, all are as
                before, or the result says which is not. With ``best_effort`` each acts by itself. ``mode`` may be
                written for ``fleet_mode``, and ``drain`` for ``mode``.

        Returns:
            What became of every selected engine. A failure of an engine is an answer, not an exception.

        Raises:
            FleetError: no engine is selected, or an option does not exist. Nothing was done.
            IdempotencyKeyError: the id stands for another request, for a day after its end.
            MembershipError, RecordError: the members or the record cannot be read or written. Nothing was done.
        """
        return await self.run(_asked(FleetRelease, selector, tags, operation_id, options))

    async def resume(
        self,
        selector: Selector | None = None,
        *,
        tags: Sequence[str] | None = None,
        operation_id: str | None = None,
        **options: Unpack[FleetResumeKeywords],
    ) -> FleetResult:
        """Bring back the device memory of ``tags`` (None: of all that are released). As ``release``, with the fields of
        ``memsaver_core.contract.requests.FleetResume``."""
        return await self.run(_asked(FleetResume, selector, tags, operation_id, options))

    async def cancel(self, operation_id: str) -> FleetResult:
        """Give up an operation that has not begun to move memory; return its result. Idempotent. Raises
        FleetError if none of this id runs, or it moves memory already."""
        running = self.history.get(operation_id)
        if running is None or running.task is None or running.has_ended:
            raise FleetError(f"the fleet has no running operation {operation_id!r} that could be cancelled")
        if running.how != "aborted" or not running.table.allows(running.state, "cancel"):
            raise FleetError(f"operation {operation_id!r} moves memory already; do the opposite when it has ended")
        running.given_up.set()
        return await running.outcome()

    async def record(self) -> RecordContent:
        """Return what is wanted of the engines, and demanded of their weights. Raises RecordError."""
        return await self._keeper.load()

    async def status(self, selector: Selector | None = None) -> FleetStatus:
        """Return what every selected engine is now, those that do not answer included."""
        parts = await self.roster.parts(selector or Selector())
        record = await self.record()
        return FleetStatus.of([part.status(record) for part in parts], record, self.progress)

    @property
    def progress(self) -> FleetProgress | None:
        """The oldest operation of the fleet that runs now, or None."""
        return next((operation.progress_now() for operation in self.history.running()), None)

    def operations(self) -> list[FleetProgress | FleetResult]:
        """Return the operations that run, and the results of the last ones, newest first."""
        begun = [each for each in self.history.recent() if each.report or not each.has_ended]
        return [each.report or each.progress_now() for each in begun]

    async def watch(self, interval_s: float = 1.0) -> AsyncIterator[FleetEvent]:
        """Yield the events of the fleet until the iterator is closed; first ``joined`` for each member. The engines are
        asked every ``interval_s`` seconds."""
        watcher = self.hub.watcher(interval_s)
        try:
            while (event := await watcher.next()) is not None:
                yield event
        finally:
            await watcher.close()

    async def recover(self) -> list[FleetResult]:
        """Finish the operations that another coordinator left in this record; return their results.

        ``release``, ``resume``, ``reconcile`` and ``keep`` begin it first, and wait for its end on their engines.
        """
        return [await operation.outcome() for operation in (await self._recover()).values()]

    async def _recover(self) -> dict[str, FleetOperation]:
        """Begin to end operations of another coordinator; return them by id. They get their engines' locks first."""
        async with self._recovering:
            if self._left is None:
                left = dict((await self._keeper.load()).running)
                if left and not self._coordinator.holds and (owners := await self._holders()):
                    advice = "call that, or repeat this 30 s after its end"
                    raise RecordError(f"the record has operations of {', '.join(owners)}, which runs: {advice}")
                self._left = left
        for operation_id, running in self._left.items():
            if operation_id not in self._recoveries:  # else it goes on
                asked = running.wanted.asked(running.sent).resolved(FLEET_TIMEOUT_S)
                operation = FleetOperation.left(operation_id, running, asked)
                self._recoveries[operation_id] = operation
                operation.task = asyncio.create_task(self._end_left(operation, self._left, running))
        return dict(self._recoveries)

    async def _end_left(self, operation: FleetOperation, left: dict[str, Running], running: Running) -> None:
        """Bring to an end what another coordinator has ``left``; the next call of ``_recover`` repeats it if that
        fails."""
        await self._concluded(operation, self._carry_on(operation, running))
        del self._recoveries[operation.id]
        if operation.error is None:
            del left[operation.id]

    async def _holders(self) -> set[str]:
        """Return the coordinators that hold engines, as far as these answer."""
        said = await self.roster.answers(await self.roster.members())
        return {part.before.coordinator for _, part in said if part is not None and part.before is not None} - {""}

    async def reconcile(self) -> list[EngineResult]:
        """Bring engines that differ from what is wanted to that state, once; return what was done, and what failed."""
        await self._recover()
        return await self._reconciler.once()

    async def keep(self, interval_s: float = 5.0) -> None:
        """Reconcile for ever: at each interval, and when the members change. Engines report this coordinator then."""
        self._coordinator.holds = True
        try:
            await self._reconciler.keep(self.reconcile, interval_s)
        finally:
            self._coordinator.holds = False

    async def close(self) -> None:
        """Wait for operations in progress, and close the connections. Engines keep their state."""
        await asyncio.gather(*(each.task for each in self.history.running() if each.task), return_exceptions=True)
        await self.roster.close()

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def run(self, asked: AskedOfFleet) -> FleetResult:
        asked = asked.resolved(FLEET_TIMEOUT_S)
        named = asked.operation_id or ""
        await self.check(asked, named)
        operation = self.known(asked, named) or self.start(FleetOperation.of(asked, named, self._coordinator.name))
        return await operation.outcome()

    async def check(self, asked: AskedOfFleet, operation_id: str, key: str | None = None) -> None:
        """Raise IdempotencyKeyError if an id, which may be made from a caller's ``key``, stands for another request,
        or RecordError if the record cannot be read. ``start`` takes the id: nothing may be awaited in between."""
        if not operation_id:
            return
        digest, record = asked.digest(), await self._keeper.load()
        first = record.first(operation_id, digest)
        running = self.history.get(operation_id)
        if running is not None and not running.has_ended and running.digest != digest:
            first = f"{running.request.operation} {operation_id}"
        if first:
            raise reused(first, key, operation_id)
        if running is not None and running.has_ended and record.known(operation_id) is not None:
            members = [part.member for part in running.parts]
            demands = getattr(running.asked, "weights_version", None) is not None  # an update may have come since
            running.overtaken = demands or record.is_overtaken(operation_id, running.request.tags, members)

    def known(self, asked: AskedOfFleet, operation_id: str) -> FleetOperation | None:
        """Return the operation of this id if it answers the request, too."""
        known = None if operation_id in self._recoveries else self.history.get(operation_id)
        if known is None or not known.answers(asked):
            return None
        known.callers += 1
        return known

    def start(self, operation: FleetOperation) -> FleetOperation:
        self.history.add(operation)
        operation.task = asyncio.create_task(self._concluded(operation, self._perform(operation)))
        return operation

    async def _concluded(self, operation: FleetOperation, work: Coroutine[Any, Any, FleetResult]) -> None:
        """Await the ``work`` that carries an operation out; record how it ends."""
        self.history.add(operation)
        try:
            operation.conclude(await work)
        except asyncio.CancelledError:
            during = f"while {operation.request.operation} {operation.id} was in phase '{operation.phase}'"
            left = "the next coordinator that uses its record completes or undoes it"
            operation.conclude(None, ServerEndsError(f"the coordinator ended {during}; {left}"))
            raise
        except Exception as error:
            operation.conclude(None, error)
        finally:
            if not (operation.repeated and operation.status == "succeeded"):
                self.on_ended(operation)
            self.history.forget()

    async def _perform(self, operation: FleetOperation) -> FleetResult:
        if (left := (await self._recover()).get(operation.id)) is not None:
            result = await left.outcome()
            self.history.add(operation)  # in place of the one that has ended
            if left.how != "aborted":
                return result
        return await self._selected(operation)

    async def _selected(self, operation: FleetOperation) -> FleetResult:
        """Carry out an operation on the engines that it selects, with their locks held. If it has to wait for these,
        the engines are asked again: meanwhile they come and go, move to other GPUs, and hold something else."""
        parts = await self._parts_of(operation)
        while True:
            names = self._lock_names(operation, parts)
            waits = self.roster.locks.any_held(names)
            async with self.roster.locks.held(names, operation.given_up):
                if waits and not operation.given_up.is_set():
                    parts = await self._parts_of(operation)
                    if self._lock_names(operation, parts) - names:
                        continue
                operation.parts = parts
                if operation.origin == "turns":
                    await self._give_way(operation)
                async with self.around(operation):
                    return await self._execute(operation)

    async def _parts_of(self, operation: FleetOperation) -> list[Part]:
        """Return a part for each engine that an operation selects now; raise NoEngineError if one is missing."""
        selector = operation.asked.selected()
        parts = await self.roster.parts(selector, partial(setattr, operation, "parts"))
        unknown = await self.roster.unknown_names(selector, parts) if parts else []
        NoEngineError.check(selector, parts, unknown)
        return parts

    def _lock_names(self, operation: FleetOperation, parts: Sequence[Part]) -> set[str]:
        if operation.request.operation == "resize":
            return {of_cache(part.member.name) for part in parts}
        return set().union(*(part.locks for part in parts))

    async def _give_way(self, operation: FleetOperation) -> None:
        """Fail the parts of a turn whose engines a caller has released for good, or whose weights a caller demands in
        another version, since the turn was decided."""
        record, asked = await self._keeper.load(), operation.asked
        for part in operation.parts:
            if reason := kept_released(part.member, record.wanted, part.before):
                part.fail("asking", EngineFailure("conflict", reason))
            elif isinstance(asked, FleetResume) and asked.weights_version != version_for(part.member, record.demands):
                part.fail("asking", EngineFailure("conflict", "callers demand other weights of it by now"))

    async def _reconciled(self, operation: FleetOperation, body: Mapping[str, Any]) -> FleetResult:
        """Carry out an operation of the reconciler, which holds the locks of its one engine."""

        async def carry_out() -> FleetResult:
            (part,) = operation.parts
            operation.how = "done"
            async with self.around(operation):
                self._report(operation, "commit")
                await part.perform(operation.asked.operation, body, "reconciling")
                return self._finish(operation)

        await self._concluded(operation, carry_out())
        return await operation.outcome()

    async def _execute(self, operation: FleetOperation) -> FleetResult:
        request, parts = operation.asked, operation.parts
        record = await self._keeper.load()
        known = record.known(operation.id)
        members = [part.member for part in parts]
        ended = known is not None and known.outcome in ("succeeded", "cancelled")
        if known is not None and (ended or record.is_overtaken(operation.id, request.tags, members)):
            return self._repeated(operation, known)
        execution = Execution(operation, self._keeper, self._coordinator, self._report)
        if request.fleet_mode == "best_effort" and not operation.given_up.is_set():
            await execution.alone()
        else:
            await execution.together()
        return self._finish(operation)

    def _repeated(self, operation: FleetOperation, known: Known) -> FleetResult:
        """Return the result of an operation that has ended, or that a later one has overtaken: it does nothing."""
        operation.repeated = True
        for part in operation.parts:
            part.after = part.before
        if known.outcome == "cancelled":
            operation.given_up.set()
            return self._finish(operation)
        operation.how = "done"
        if known.resized is not None:  # engines no longer know it, so that no failure can be answered
            operation.parts = [Part(part.member, part.connection, after=part.before) for part in operation.parts]
        overtaken = known.outcome != "succeeded"
        for part in operation.parts:
            if known.resized is None:
                what = f"a later call was about these engines, or some of them; use a new id to {known.verb} them"
                part.check(part.before, operation.asked, "asking", what if overtaken else UNDONE)
            elif overtaken:
                what = "a later call was about the size of its KV cache; use a new id to set it again"
                part.fail("asking", EngineFailure("changed", what))
        return self._finish(operation)

    async def _carry_on(self, operation: FleetOperation, left: Running) -> FleetResult:
        gpus = {gpu for each in left.engines.values() for gpu in each.gpus}
        async with self.roster.locks.held(gpus.union(left.engines)):
            listed = {(member.name, member.url): member for member in await self.membership.members()}
            for name, prepared in left.engines.items():
                found = listed.get((name, prepared.url)) or Member(name, prepared.url)
                member = replace(found, model=found.model or prepared.model, gpus=found.gpus or prepared.gpus)
                part = Part(member, self.roster.connection(member))
                part.operation_id, part.tags, part.kept = prepared.operation_id, prepared.tags, prepared.kept
                operation.parts.append(part)
            execution = Execution(operation, self._keeper, self._coordinator, self._report)
            end = {"preparing": execution.abandon, "committing": execution.commit, "rolling_back": execution.undo}
            async with self.around(operation):
                await end[left.stage]()
                result = self._finish(operation)
        logger.warning("operation %s, which another coordinator had begun: %s", operation.id, result.message)
        return result

    def _finish(self, operation: FleetOperation) -> FleetResult:
        result = operation.summed_up(self._coordinator)
        self.hub.publish("result", **result.model_dump(mode="json"))
        return result

    def _report(self, operation: FleetOperation, event: str) -> None:
        operation.advance(event)
        self.hub.publish("operation", **operation.progress_now().model_dump(mode="json"))


def _asked(
    model: type[FleetRelease | FleetResume],
    selector: Selector | None,
    tags: Sequence[str] | None,
    operation_id: str | None,
    options: Mapping[str, object],
) -> AskedOfFleet:
    """Return the request of a call; raise FleetError if an option does not exist, or has a wrong value."""
    acts = acts_of(model)
    known = (FleetReleaseKeywords if model is FleetRelease else FleetResumeKeywords).__annotations__
    for name in options.keys() - known.keys():
        if name not in acts or acts[name].fleet == "own":  # else the model says why a fleet refuses it
            raise FleetError(f"the {model.operation} of a fleet has no option {name!r}; it takes {', '.join(known)}")
    asked = {**options, "selector": selector, "operation_id": operation_id}
    given = {name: value for name, value in asked.items() if value is not None}
    mode = given.get("mode")
    if mode in get_args(FleetMode):
        given["fleet_mode"] = given.pop("mode")
    elif mode not in (None, *get_args(DrainMode)):
        raise FleetError(f"unknown mode {mode!r}; choose one of {', '.join(get_args(FleetMode))}")
    if "drain" in given:
        given["mode"] = given.pop("drain")
    if tags:
        given["tags"] = [tags] if isinstance(tags, str) else list(tags)
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise FleetError(f"cannot {model.operation} the fleet: {wrong_fields(error)}") from None
