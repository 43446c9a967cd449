"""Brings engines that came late, or came back, to what is wanted; reports those that are gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from memsaver_core.contract.errors import FleetUnknownError
from memsaver_core.contract.requests import Selector
from memsaver_server.fleet.connection import EngineFailure
from memsaver_server.fleet.members import Member
from memsaver_server.fleet.operation import FleetOperation
from memsaver_server.fleet.parts import Part, unlike
from memsaver_server.fleet.record import VERBS, Keeper, RecordContent, Wanted, version_for, wish_for, wishes_for
from memsaver_server.fleet.results import EngineResult, FleetResult, serves_nothing
from memsaver_server.fleet.roster import Roster
from memsaver_server.fleet.watching import Hub

logger = logging.getLogger("memsaver")

#: Pause after an error, seconds.
AGAIN_S = 1.0


class Reconciler:
    """Use it in one event loop."""

    def __init__(
        self,
        roster: Roster,
        keeper: Keeper,
        hub: Hub,
        perform: Callable[[FleetOperation, Mapping[str, Any]], Awaitable[FleetResult]],
    ) -> None:
        """``perform`` carries out an operation on one engine, to which it sends this body."""
        self._perform = perform
        self._roster = roster
        self._keeper = keeper
        self._hub = hub
        self._troubles: dict[str, str] = {}  # the failure that was logged last, by engine
        self._failed: dict[str, FleetOperation] = {}  # the operation that failed last, by engine
        self._late: set[asyncio.Future[object]] = set()  # calls of `once` that still wait for silent engines
        self._busy: set[str] = set()  # engines that are asked, or brought to what is wanted
        self._rivals: set[str] = set()  # other coordinators that hold engines of ours

    async def keep(self, once: Callable[[], Awaitable[object]], interval_s: float) -> None:
        """Call ``once`` at each interval, and when the members change, without end. Errors are logged."""
        trouble = ""
        while True:
            going = asyncio.ensure_future(once())
            try:
                # A call ends once silent engines answer or time out; meanwhile the next call handles the others.
                await asyncio.wait({going}, timeout=interval_s)
                if going.done():
                    going.result()
                else:
                    self._late.add(going)
                    going.add_done_callback(self._end_late)
                with anyio.move_on_after(interval_s):
                    await self._roster.membership.changed()
                trouble = ""
            except asyncio.CancelledError:
                for each in (going, *self._late):
                    each.cancel()
                raise
            except Exception as error:
                if str(error) != trouble:
                    bug = None if isinstance(error, FleetUnknownError) else error
                    logger.error("the fleet cannot be reconciled now; trying again: %s", error, exc_info=bug)
                trouble = str(error)
                await asyncio.sleep(min(interval_s, AGAIN_S))

    def _end_late(self, going: asyncio.Future[object]) -> None:
        self._late.discard(going)
        if not going.cancelled() and (error := going.exception()) is not None:
            logger.error("the fleet could not be reconciled; trying again: %s", error)

    async def once(self) -> list[EngineResult]:
        """See ``AsyncFleet.reconcile``. Raises MembershipError or RecordError if the members or the record cannot be
        read: nothing was done."""
        members = [each for each in await self._roster.members() if each.name not in self._busy]
        record = await self._keeper.load()
        results = await asyncio.gather(*(self._bring(member, record) for member in members))
        for of_engines in (self._troubles, self._failed):
            for name in of_engines.keys() - self._busy - {member.name for member in members}:
                del of_engines[name]
        return [result for each in results for result in each]

    async def _bring(self, member: Member, record: RecordContent) -> list[EngineResult]:
        """Bring one engine to what is wanted; return what was done."""
        self._busy.add(member.name)
        try:
            part = await self._roster.asked(member)
            now, steps = part.before, _steps(part, record.wanted)
            if now is not None and not steps:
                kind, excluded = serves_nothing(now, version_for(part.member, record.demands))
                if excluded:
                    part.after = now
                    part.fail("reconciling", EngineFailure(kind, excluded))
            if part.failure is not None or self._has_rival(part) or not steps:
                self._report(part)  # else _step reports, as it may fail again
                return [part.result(undone=False)] if part.failure is not None else []
            async with self._roster.locks.held(part.locks):  # an operation may have moved it, or changed what is wanted
                part, record = await self._roster.asked(member), await self._keeper.load()
                demanded = version_for(part.member, record.demands)
                return [await self._step(part, *step, demanded) for step in _steps(part, record.wanted)]
        finally:
            self._busy.discard(member.name)

    async def _step(self, part: Part, wish: Wanted, tags: tuple[str, ...], demanded: str | None) -> EngineResult:
        name, verb = part.member.name, VERBS[wish.state]
        of = f" of {wish.client}" if wish.client else ""
        cause = f"wanted {wish.state} since operation {wish.operation_id}{of}"
        asked = wish.asked().model_copy(update={"tags": tags, "selector": Selector(names=(name,))})
        # What fails is tried at each interval: all attempts are one operation.
        failed = self._failed.pop(name, None)
        operation_id = failed.id if failed is not None and failed.request.operation == verb else ""
        operation = FleetOperation.of(asked, operation_id, self._roster.coordinator.name, "reconciler", cause)
        operation.parts = [Part(part.member, part.connection)]
        demands = {"weights_version": demanded} if verb == "resume" and demanded else {}
        (result,) = (await self._perform(operation, {"tags": list(tags), **wish.options, **demands})).engines
        self._report(operation.parts[0])
        if result.success:
            logger.warning("engine %s was not as wanted: %s of %s, %s", name, verb, ", ".join(tags), cause)
        else:
            self._failed[name] = operation
        self._hub.publish("reconciled", name, **result.model_dump(mode="json"))
        return result

    def _has_rival(self, part: Part) -> bool:
        """Return whether another coordinator holds the engine as well; log each such coordinator once."""
        other = part.before.coordinator if part.before is not None and self._roster.coordinator.holds else ""
        if other in ("", self._roster.coordinator.name):
            return False
        if other not in self._rivals:
            self._rivals.add(other)
            logger.warning(
                "engine %s is held by %s, too, or was until lately: while there are two coordinators, none brings it "
                "to what is wanted, and the last operation counts; end one of them",
                part.member.name,
                other,
            )
        return True

    def _report(self, part: Part) -> None:
        """Log when an engine fails, and when it is back; once each."""
        name, trouble = part.member.name, str(part.failure or "")
        if trouble and trouble != self._troubles.get(name):
            logger.warning("engine %s: %s", name, trouble)
            self._troubles[name] = trouble
        elif not trouble and self._troubles.pop(name, ""):
            logger.warning("engine %s is as wanted now", name)


def _steps(part: Part, wanted: tuple[Wanted, ...]) -> list[tuple[Wanted, tuple[str, ...]]]:
    """Return the wishes that an engine does not meet, each with the tags that are not as wanted; none if it is busy."""
    if part.before is None or part.before.operation_id is not None:
        return []
    wishes = wishes_for(part.member, wanted, part.before)
    steps: dict[int, list[str]] = {}
    for tag in part.before.tags:
        wish = wish_for(tag.tag, wishes)
        if wish is not None and unlike(part.before, wish.state, (tag.tag,)):
            steps.setdefault(wanted.index(wish), []).append(tag.tag)
    return [(wanted[at], tuple(tags)) for at, tags in steps.items()]
