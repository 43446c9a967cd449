"""What the engines are: looked at once for all readers, at intervals and after each operation."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from memsaver_core.contract.requests import Selector
from memsaver_server import clock
from memsaver_server.fleet.fleet import AsyncFleet
from memsaver_server.fleet.members import Member, MembershipError
from memsaver_server.fleet.record import RecordError
from memsaver_server.fleet.results import EngineStatus, FleetStatus
from memsaver_server.fleet.status import common_state, engine_status

logger = logging.getLogger("memsaver")

#: Shortest interval between looks, seconds. A look may take a fifth of the time: that of many engines is rarer.
INTERVAL_S = 1.0
SHARE = 5
#: How long a reader waits for a look, seconds.
GLANCE_S = 1.0
#: Readings that are kept for the dashboard.
KEPT = 900


class Observer:
    """Use it in one event loop.

    Attributes:
        status: the fleet as last seen.
        keys: the keys of the engines, by name.
        trouble: why the fleet cannot be looked at; empty if it can.
        readings: device memory in use on all GPUs together, bytes; ``at`` is seconds since the epoch.
    """

    def __init__(self, fleet: AsyncFleet, engine_key: str | None, seen: Callable[[FleetStatus], None]) -> None:
        self._fleet = fleet
        self._engine_key = engine_key
        self._seen = seen
        self._first: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None
        self._engines: dict[str, tuple[float, EngineStatus]] = {}  # with the beginning of the look that saw it
        self.status = FleetStatus(state="", engines=[], wanted=[])
        self.members: dict[str, Member] = {}
        self.keys: dict[str, str | None] = {}
        self.trouble = "the engines have not been asked yet"
        self.readings: deque[dict[str, Any]] = deque(maxlen=KEPT)

    async def begin(self) -> None:
        """Look at each engine by itself for the first time; do not wait long for those that do not answer."""
        try:
            names = [member.name for member in await self._fleet.membership.members()]
        except MembershipError as error:
            self._complain(str(error))
            return
        self._first = {asyncio.create_task(self.look([name])) for name in names}
        if self._first:
            await asyncio.wait(self._first, timeout=GLANCE_S)

    async def glance(self) -> None:
        """Look, but wait for engines that do not answer only a moment: they are as last seen."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self.look())
        await asyncio.wait({self._looking}, timeout=GLANCE_S)

    async def look(self, names: Iterable[str] | None = None) -> None:
        """Look at the engines ``names`` and those that share a GPU with them, or at all. Raises nothing."""
        began = clock.monotonic()
        try:
            members = await self._fleet.membership.members()
            status = await self._fleet.status(None if names is None else Selector(names=self._near(names)))
        except (MembershipError, RecordError) as error:
            self._complain(str(error))
            return
        except Exception as error:  # the next look may succeed; until then nothing that was seen counts
            self._complain(f"internal error, {type(error).__name__}: {error}", error)
            return
        self.trouble = ""
        self.members = {member.name: member for member in members}
        self.keys.clear()
        self.keys.update({member.name: member.api_key or self._engine_key for member in members})
        self._merge(began, status)
        if names is None:
            self.readings.append({"at": time.time(), "used_bytes": {0: _used_bytes(self.status)}})
        self._seen(self.status)

    async def keep(self) -> None:
        """Look for ever."""
        while True:
            began = clock.monotonic()
            await self.look()
            await asyncio.sleep(max(INTERVAL_S, (SHARE - 1) * (clock.monotonic() - began)))

    def _near(self, names: Iterable[str]) -> tuple[str, ...]:
        found = set(names)
        gpus = {gpu for engine in self.status.engines if engine.name in found for gpu in engine.gpus}
        return tuple(found | {engine.name for engine in self.status.engines if gpus & set(engine.gpus)})

    def _merge(self, began: float, status: FleetStatus) -> None:
        """Take what was seen; of two looks at an engine, that which began later counts."""
        for engine in status.engines:
            if engine.name not in self._engines or self._engines[engine.name][0] <= began:
                self._engines[engine.name] = began, engine
        for name in self._engines.keys() - self.members.keys():
            del self._engines[name]
        engines = [
            self._engines[name][1] if name in self._engines else engine_status(member, None, "it has not answered yet")
            for name, member in self.members.items()
        ]
        self.status = status.model_copy(update={"engines": engines, "state": common_state(engines)})

    def _complain(self, trouble: str, bug: Exception | None = None) -> None:
        if trouble != self.trouble:
            logger.error("the fleet cannot be looked at: %s", trouble, exc_info=bug)
        self.trouble = trouble


def _used_bytes(status: FleetStatus) -> int:
    occupations = [engine.occupation for engine in status.engines if engine.occupation is not None]
    return sum({device.uuid: device.used_bytes for each in occupations for device in each.devices}.values())
