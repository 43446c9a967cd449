"""The coordinator: releases and resumes the engines of a fleet, all of them or none."""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from typing import Any

from memsaver_server.fleet.alone import run_alone
from memsaver_server.fleet.connection import EngineFailure
from memsaver_server.fleet.hub import Hub
from memsaver_server.fleet.keeper import Keeper
from memsaver_server.fleet.locks import Locks
from memsaver_server.fleet.members import Member, Membership
from memsaver_server.fleet.operation import FleetOperation
from memsaver_server.fleet.outcome import Outcome
from memsaver_server.fleet.parts import Part
from memsaver_server.fleet.reconciler import Reconciler
from memsaver_server.fleet.record import MemoryRecord, Record, Running
from memsaver_server.fleet.request import DEFAULT_TIMEOUT_S, FleetRequest
from memsaver_server.fleet.results import (
    EngineResult,
    FleetError,
    FleetEvent,
    FleetProgress,
    FleetResult,
    FleetStatus,
    Mode,
    Stage,
)
from memsaver_server.fleet.roster import Roster
from memsaver_server.fleet.selectors import Selector
from memsaver_server.fleet.status import status_of
from memsaver_server.fleet.together import Together
from memsaver_server.fleet.watching import watch
from memsaver_server.schemas import DrainMode

#: Results of finished operations that are remembered.
_HISTORY = 64


class AsyncFleet:
    """Coordinates the engines of a membership. Use it in one event loop, and one of it for a record.

    It keeps no truth of its own: what the engines are is asked of them, what is wanted is in the record. Operations
    that share an engine or a GPU run one after another, others side by side.

    Args:
        membership: lists the engines.
        record: what is wanted, and how far operations are. By default it ends with this object.
        api_key: the key of the engines that have none of their own in ``Member.api_key``.
        lease_s: how long an engine stays prepared without this coordinator, seconds.
        silence_s: an engine that does not answer for so long counts as unreachable, seconds.
        verify: as for the client.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        record: Record | None = None,
        api_key: str | None = None,
        lease_s: float = 30.0,
        silence_s: float = 10.0,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        self.membership = membership
        self._lease_s = lease_s
        self._silence_s = silence_s
        self._keeper = Keeper(record or MemoryRecord())
        self._locks = Locks()
        self._roster = Roster(membership, self._locks, api_key, silence_s, verify)
        self._hub = Hub()
        self._operations: dict[str, FleetOperation] = {}
        self._results: OrderedDict[str, FleetResult] = OrderedDict()
        self._recovering = asyncio.Lock()
        self._recovered = False
        self._reconciler = Reconciler(self._roster, self._keeper, self._locks, self._hub)

    async def release(
        self,
        selector: Selector | None = None,
        *,
        tags: Sequence[str] | None = None,
        mode: Mode = "all",
        hibernate: bool = False,
        drain: DrainMode = "wait",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        operation_id: str | None = None,
        **options: Any,
    ) -> FleetResult:
        """Release the device memory of ``tags`` (None: of all) on the selected engines.

        A caller that is cancelled cancels nothing: the operation continues. ``cancel`` does.

        Args:
            mode: ``all``: prepare on all, then commit on all; if one fails, all are as before, or the result says which
                is not. ``best_effort``: on each by itself.
            drain: what becomes of requests in flight, the field ``mode`` of an engine's release.
            timeout_s: deadline of the drain on each engine, seconds.
            operation_id: the id of this operation; a repeat with the same id does nothing twice. It carries out what
                has failed.
            options: ``restore``, ``trim`` and ``verify`` of ``schemas.ReleaseFields``.

        Returns:
            What became of every selected engine. A failure of an engine is an answer, not an exception.

        Raises:
            FleetError: no engine is selected, or an option does not exist. Nothing was done.
            MembershipError, RecordError: the members or the record cannot be read or written. Nothing was done.
        """
        own = {"hibernate": hibernate, "mode": drain}
        return await self._run(FleetRequest.of("release", selector, tags, mode, timeout_s, operation_id, options, own))

    async def resume(
        self,
        selector: Selector | None = None,
        *,
        tags: Sequence[str] | None = None,
        mode: Mode = "all",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        operation_id: str | None = None,
        **options: Any,
    ) -> FleetResult:
        """Bring back the device memory of ``tags`` (None: of all that are released). As ``release``.

        Args:
            timeout_s: how long an engine may take to prepare, seconds.
            options: ``wait_for_memory_s`` and ``verify`` of ``schemas.ResumeFields``.
        """
        return await self._run(FleetRequest.of("resume", selector, tags, mode, timeout_s, operation_id, options, {}))

    async def cancel(self, operation_id: str) -> FleetResult:
        """Give up an operation in mode ``all`` that has not begun to commit; return its result. Idempotent.

        Raises:
            FleetError: none of this id runs, or it moves memory already.
        """
        running = self._operations.get(operation_id)
        if running is None or running.task is None:
            raise FleetError(f"no operation {operation_id!r} of the fleet runs that could be cancelled")
        if not running.can_be_cancelled:
            raise FleetError(f"operation {operation_id!r} moves memory already; do the opposite when it has ended")
        running.cancelled.set()
        return await asyncio.shield(running.task)

    async def status(self, selector: Selector | None = None) -> FleetStatus:
        """Return what every selected engine is now, those that do not answer included."""
        parts = await self._roster.parts(selector or Selector())
        return status_of(parts, (await self._keeper.load()).wanted, self.progress)

    @property
    def progress(self) -> FleetProgress | None:
        """The oldest operation of the fleet that runs now, or None."""
        return next((operation.progress() for operation in self._operations.values()), None)

    def operations(self) -> list[FleetProgress | FleetResult]:
        """Return the operations that run, and the results of the last ones, newest first."""
        ended: list[FleetProgress | FleetResult] = list(self._results.values())
        return [*ended, *(operation.progress() for operation in self._operations.values())][::-1]

    def watch(self, interval_s: float = 1.0) -> AsyncIterator[FleetEvent]:
        """Yield the events of the fleet until the iterator is closed; first ``joined`` for each member.

        Args:
            interval_s: how often the engines are asked, seconds.
        """
        return watch(self._roster, self._hub, interval_s)

    async def recover(self) -> list[FleetResult]:
        """Bring to an end what another coordinator with this record had begun; return what became of it.

        ``release``, ``resume``, ``reconcile`` and ``keep`` do it first.
        """
        async with self._recovering:
            if self._recovered:
                return []
            left = (await self._keeper.load()).running
            results = [await self._carry_on(operation_id, running) for operation_id, running in left.items()]
            self._recovered = True
            return results

    async def reconcile(self) -> list[EngineResult]:
        """Bring engines that are not what is wanted to it, once; return what was done, and what could not be."""
        await self.recover()
        return await self._reconciler.once()

    async def keep(self, interval_s: float = 5.0) -> None:
        """Reconcile for ever: at each interval, and whenever the members change."""
        await self._reconciler.keep(self.reconcile, interval_s)

    async def close(self) -> None:
        """Wait for operations in progress, and close the connections. Engines keep their state."""
        running = [operation.task for operation in self._operations.values() if operation.task is not None]
        await asyncio.gather(*running, return_exceptions=True)
        await self._roster.close()

    async def __aenter__(self) -> AsyncFleet:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _run(self, request: FleetRequest) -> FleetResult:
        ended = self._results.get(request.operation_id)
        if ended is not None and ended.success:
            return ended
        operation = self._operations.get(request.operation_id)
        if operation is None:
            self._results.pop(request.operation_id, None)
            operation = FleetOperation(request, after_failure=ended is not None)
            self._operations[request.operation_id] = operation
            operation.task = asyncio.create_task(self._perform(operation))
        assert operation.task is not None
        return await asyncio.shield(operation.task)

    async def _perform(self, operation: FleetOperation) -> FleetResult:
        request = operation.request
        try:
            await self.recover()
            if request.operation_id in self._results:
                return self._results[request.operation_id]
            parts = await self._roster.parts(request.selector)
            if not parts:
                raise FleetError(f"no engine of the fleet matches {request.selector.model_dump(exclude_defaults=True)}")
            return await self._locked(operation, parts)
        finally:
            self._operations.pop(request.operation_id, None)

    async def _locked(self, operation: FleetOperation, parts: list[Part]) -> FleetResult:
        names = {part.member.name for part in parts} | {uuid for part in parts for uuid in part.member.gpus}
        waits = self._locks.any_held(names)
        async with self._locks.held(names):
            if waits:  # what they hold may have changed
                parts = [Part(part.member, part.connection) for part in parts]
                await asyncio.gather(*map(self._roster.ask, parts))
            operation.parts = parts
            return await self._execute(operation)

    async def _execute(self, operation: FleetOperation) -> FleetResult:
        request, parts = operation.request, operation.parts
        wanted = (await self._keeper.load()).wanted
        if not operation.after_failure and any(wish.operation_id == request.operation_id for wish in wanted):
            for part in parts:
                part.found_done(request.state)
            result = self._finish(operation, Outcome(request, parts, "each", self._lease_s))
            del self._results[request.operation_id]  # a repeat finds this out again
            return result
        if request.mode == "best_effort":
            await run_alone(request, parts, self._keeper, lambda stage: self._tell(operation, stage))
            return self._finish(operation, Outcome(request, parts, "each", self._lease_s))
        for part in parts:
            if part.before is not None and "prepared" not in part.before.model_fields_set:
                part.fail("asking", _cannot_prepare(part.member))
        together = self._together(operation)
        await together.run()
        why = "it was cancelled" if operation.cancelled.is_set() and together.outcome == "aborted" else ""
        return self._finish(operation, Outcome(request, parts, together.outcome, self._lease_s, why))

    def _together(self, operation: FleetOperation) -> Together:
        return Together(
            operation, self._keeper, self._lease_s, self._silence_s, lambda stage: self._tell(operation, stage)
        )

    async def _carry_on(self, operation_id: str, left: Running) -> FleetResult:
        """Bring an operation of another coordinator to its end."""
        operation = FleetOperation(FleetRequest.again(operation_id, left.wanted))
        for name, prepared in left.engines.items():
            member = await self._roster.find(name, prepared.url)
            part = Part(member, self._roster.connection(member))
            part.operation_id, part.tags = prepared.operation_id, prepared.tags
            operation.parts.append(part)
        self._operations[operation_id] = operation
        try:
            together = self._together(operation)
            if left.stage == "preparing":
                await together.abandon()
            elif left.stage == "committing":
                await together.commit()
            else:
                await together.undo()
            why = "the coordinator that had begun it is gone" if together.outcome == "aborted" else ""
            outcome = Outcome(operation.request, operation.parts, together.outcome, self._lease_s, why)
            result = self._finish(operation, outcome)
            if together.outcome == "aborted":
                del self._results[operation_id]  # nothing was done: a repeat does it
            return result
        finally:
            self._operations.pop(operation_id, None)

    def _finish(self, operation: FleetOperation, outcome: Outcome) -> FleetResult:
        result = outcome.result(operation.began)
        self._results[result.operation_id] = result
        while len(self._results) > _HISTORY:
            self._results.popitem(last=False)
        self._hub.publish("result", **result.model_dump(mode="json"))
        return result

    def _tell(self, operation: FleetOperation, stage: Stage) -> None:
        operation.stage = stage
        self._hub.publish("operation", **operation.progress().model_dump(mode="json"))


def _cannot_prepare(member: Member) -> EngineFailure:
    return EngineFailure(
        "cannot_prepare",
        f"the service at {member.url} is older and cannot prepare; upgrade it, leave it out, or use mode best_effort",
    )
