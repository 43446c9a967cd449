"""Brings engines that came late, or came back, to what is wanted; reports those that are gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from memsaver_server.fleet.locks import Locks
from memsaver_server.fleet.members import MembershipError
from memsaver_server.fleet.parts import Part
from memsaver_server.fleet.record import VERBS, Keeper, RecordError, Wanted
from memsaver_server.fleet.results import EngineResult
from memsaver_server.fleet.roster import Roster
from memsaver_server.fleet.status import wishes_for
from memsaver_server.fleet.watching import Hub

logger = logging.getLogger("memsaver")

#: Pause after an error, seconds.
AGAIN_S = 1.0


class Reconciler:
    """Use it in one event loop."""

    def __init__(self, roster: Roster, keeper: Keeper, locks: Locks, hub: Hub) -> None:
        self._roster = roster
        self._keeper = keeper
        self._locks = locks
        self._hub = hub
        self._troubles: dict[str, str] = {}  # what was logged last, by engine

    async def keep(self, once: Callable[[], Awaitable[object]], interval_s: float) -> None:
        """Call ``once`` for ever: at each interval, and when the members change. Errors are logged and end nothing."""
        trouble = ""
        while True:
            try:
                await once()
                await self._changed(interval_s)
                trouble = ""
            except Exception as error:
                if str(error) != trouble:
                    bug = None if isinstance(error, (MembershipError, RecordError)) else error
                    logger.error("the fleet cannot be reconciled now, which is tried again: %s", error, exc_info=bug)
                trouble = str(error)
                await asyncio.sleep(min(interval_s, AGAIN_S))

    async def _changed(self, interval_s: float) -> None:
        """Wait until the members change, at most ``interval_s`` seconds."""
        changed = asyncio.ensure_future(self._roster.membership.changed())
        try:
            await asyncio.wait({changed}, timeout=interval_s)
            if changed.done():
                changed.result()
        finally:
            changed.cancel()

    async def once(self) -> list[EngineResult]:
        """See ``AsyncFleet.reconcile``.

        Raises:
            MembershipError, RecordError: the members or the record cannot be read. Nothing was done.
        """
        parts = await self._roster.look()
        wanted = (await self._keeper.load()).wanted
        idle = [part for part in parts if not self._locks.any_held(part.locks)]
        results = await asyncio.gather(*(self._bring(part, wanted) for part in idle))
        for name in self._troubles.keys() - {part.member.name for part in parts}:
            del self._troubles[name]
        return [result for each in results for result in each]

    async def _bring(self, part: Part, wanted: tuple[Wanted, ...]) -> list[EngineResult]:
        """Bring one engine to what is wanted; return what was done."""
        self._report(part)
        if part.failure is not None:
            return [part.result(undone=False)]
        if not _steps(part, wanted):
            return []
        async with self._locks.held(part.locks):
            return [await self._step(part, wish, tags) for wish, tags in _steps(part, wanted)]

    async def _step(self, part: Part, wish: Wanted, tags: tuple[str, ...]) -> EngineResult:
        verb = VERBS[wish.state]
        step = Part(part.member, part.connection)
        await step.perform(verb, {"tags": list(tags), **wish.options}, "reconciling")
        self._report(step)
        result = step.result(undone=False)
        if result.success:
            logger.info("engine %s was not as wanted: %s of %s", result.name, verb, ", ".join(tags))
        self._hub.publish("reconciled", part.member.name, **result.model_dump(mode="json"))
        return result

    def _report(self, part: Part) -> None:
        """Log when an engine fails, and when it is back; once each."""
        name, trouble = part.member.name, str(part.failure or "")
        if trouble and trouble != self._troubles.get(name):
            logger.warning("engine %s: %s", name, trouble)
            self._troubles[name] = trouble
        elif not trouble and self._troubles.pop(name, ""):
            logger.info("engine %s answers again", name)


def _steps(part: Part, wanted: tuple[Wanted, ...]) -> list[tuple[Wanted, tuple[str, ...]]]:
    """Return the wishes that an idle engine does not meet, with the tags that are not as wanted."""
    if part.before is None or part.before.operation_id is not None:  # it is busy with what somebody asked for
        return []
    wishes = wishes_for(part.member, wanted)
    steps: dict[int, list[str]] = {}
    for tag in part.before.tags:
        wish = wishes.get(tag.tag, wishes.get(None))
        if wish is not None and (tag.resident_bytes if wish.state == "released" else tag.released_bytes):
            steps.setdefault(wanted.index(wish), []).append(tag.tag)
    return [(wanted[at], tuple(tags)) for at, tags in steps.items()]
