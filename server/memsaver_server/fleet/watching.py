"""The events of a fleet as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from memsaver_server.fleet.connection import EngineFailure
from memsaver_server.fleet.hub import Hub, Queue
from memsaver_server.fleet.members import MembershipError
from memsaver_server.fleet.parts import Part, state_of
from memsaver_server.fleet.results import FleetEvent
from memsaver_server.fleet.roster import Roster
from memsaver_server.fleet.selectors import Selector


async def watch(roster: Roster, hub: Hub, interval_s: float) -> AsyncIterator[FleetEvent]:
    """See ``AsyncFleet.watch``."""
    with hub.watcher() as queue:
        looking = asyncio.create_task(_Looking(roster, queue).keep(interval_s))
        try:
            while (event := await queue.next(looking)) is not None:
                yield event
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking


class _Looking:
    """Asks the engines, for one watcher: their operations may be those of other callers."""

    def __init__(self, roster: Roster, queue: Queue) -> None:
        self._roster = roster
        self._queue = queue
        self._seen: dict[str, str] = {}  # the state of each member; empty for one that does not answer
        self._progress: dict[str, object] = {}
        self._trouble = ""

    async def keep(self, interval_s: float) -> None:
        while True:
            try:
                parts = await self._roster.parts(Selector())
            except MembershipError as error:
                if str(error) != self._trouble:
                    self._queue.put("error", error=str(error))
                self._trouble = str(error)
            else:
                self._trouble = ""
                self._compare(parts)
                await asyncio.gather(*map(self._follow, parts))
            await asyncio.sleep(interval_s)

    def _compare(self, parts: list[Part]) -> None:
        for name in self._seen.keys() - {part.member.name for part in parts}:
            del self._seen[name]
            self._queue.put("left", name)
        for part in parts:
            name = part.member.name
            state = state_of(part.before) if part.before is not None else ""
            known = self._seen.get(name)
            self._seen[name] = state
            if known is None:
                self._queue.put("joined", name, url=part.member.url, model=part.member.model)
            if not state and known != "":
                self._queue.put("dead", name, error=str(part.failure))
            elif state and known == "":
                self._queue.put("back", name, state=state)
            elif state != known:
                self._queue.put("state", name, state=state)

    async def _follow(self, part: Part) -> None:
        """Tell the progress of the operation that the engine carries out."""
        name = part.member.name
        if part.before is None or part.before.operation_id is None:
            self._progress.pop(name, None)
            return
        try:
            now = await part.connection.operation(part.before.operation_id)
        except EngineFailure:  # it has just ended; or the next look tells
            return
        data = now.model_dump(
            mode="json", include={"operation_id", "operation", "status", "phase", "seconds", "stalled", "progress"}
        )
        about = {key: value for key, value in data.items() if key != "seconds"}
        if about != self._progress.get(name):
            self._progress[name] = about
            self._queue.put("progress", name, **data)
