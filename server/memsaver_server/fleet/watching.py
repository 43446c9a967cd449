"""The events of a fleet, as a stream for each watcher."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

from memsaver_server.fleet.connection import EngineFailure
from memsaver_server.fleet.members import Member, MembershipError
from memsaver_server.fleet.parts import Part
from memsaver_server.fleet.results import FleetEvent, state_of
from memsaver_server.fleet.roster import Roster

#: Events that wait for one watcher; a slower one loses the oldest.
_WAITING = 10_000


class Hub:
    """Hands events to all watchers. Use it in one event loop."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._watchers: set[Watcher] = set()

    def publish(self, event: str, engine: str = "", **data: Any) -> None:
        """Hand an event to all watchers; never waits."""
        for watcher in self._watchers:
            watcher.put(event, engine, **data)

    def watcher(self, interval_s: float) -> Watcher:
        """Begin to watch, until it is closed."""
        watcher = Watcher(self._roster, interval_s)
        self._watchers.add(watcher)
        watcher.looking.add_done_callback(lambda _: self._watchers.discard(watcher))
        return watcher

    async def close(self) -> None:
        for watcher in list(self._watchers):
            await watcher.close()


class Watcher:
    """The events of one watcher. It asks the engines itself: their operations may be those of other callers."""

    def __init__(self, roster: Roster, interval_s: float) -> None:
        self._events: asyncio.Queue[FleetEvent | None] = asyncio.Queue(_WAITING)  # None is the end
        self._roster = roster
        self._seen: dict[str, str] = {}  # the state of each member; ``silent``, or empty for one that does not answer
        self._follows: dict[str, asyncio.Task[None]] = {}  # of the operation that each member carries out
        self._progress: dict[str, object] = {}
        self._trouble = ""
        self.looking = asyncio.create_task(self._look_on(interval_s))
        self.looking.add_done_callback(lambda _: self._append(None))

    async def next(self) -> FleetEvent | None:
        """Wait for an event; return None once this is closed."""
        event = await self._events.get()
        if event is None and not self.looking.cancelled():
            self.looking.result()
        return event

    async def close(self) -> None:
        self.looking.cancel()
        with suppress(asyncio.CancelledError):
            await self.looking

    def put(self, event: str, engine: str = "", **data: Any) -> None:
        self._append(FleetEvent(at=time.time(), event=event, engine=engine, data=data))

    def _append(self, event: FleetEvent | None) -> None:
        if self._events.full():
            self._events.get_nowait()
        self._events.put_nowait(event)

    async def _look_on(self, interval_s: float) -> None:
        while True:
            try:
                members = await self._roster.members()
            except MembershipError as error:
                if str(error) != self._trouble:
                    self.put("error", error=str(error))
                self._trouble = str(error)
            else:
                self._trouble = ""
                await self._look(members, interval_s / 2)
            await asyncio.sleep(interval_s)

    async def _look(self, members: list[Member], max_age_s: float) -> None:
        for name in self._seen.keys() - {member.name for member in members}:
            del self._seen[name]
            self.put("left", name)
        said = await self._roster.answers(members, max_age_s)
        for member, part in said:
            self._compare(member, part)
        self._follows = {name: follow for name, follow in self._follows.items() if not follow.done()}
        for member, part in said:
            if part is not None and member.name not in self._follows:
                self._follows[member.name] = asyncio.create_task(self._follow(part))
        await self._roster.until_answered((member, self._follows[member.name]) for member, part in said if part)

    def _compare(self, member: Member, part: Part | None) -> None:
        """Publish what has changed of a member; ``part`` is its answer, None if it is silent."""
        name, known = member.name, self._seen.get(member.name)
        state = "silent" if part is None else state_of(part.before) if part.before is not None else ""
        self._seen[name] = state
        if known is None:
            self.put("joined", name, url=member.url, model=part.member.model if part else member.model)
        if state == known:
            return
        if part is None:
            self.put("silent", name, error=f"{member.url} gives no answer")
        elif not state:
            self.put("dead", name, error=str(part.failure))
        else:
            self.put("back" if known in ("", "silent") else "state", name, state=state)

    async def _follow(self, part: Part) -> None:
        """Report the progress of the operation that the engine carries out."""
        name = part.member.name
        if part.before is None or part.before.operation_id is None:
            self._progress.pop(name, None)
            return
        try:
            now = await part.connection.operation(part.before.operation_id)
        except EngineFailure:  # it has just ended; or the next look shows it
            return
        shown = {"operation_id", "operation", "status", "phase", "seconds", "stalled", "progress"}
        data = now.model_dump(mode="json", include=shown)
        about = {key: value for key, value in data.items() if key != "seconds"}
        if about != self._progress.get(name):
            self._progress[name] = about
            self.put("progress", name, **data)
