"""What the engines are: looked at once for all readers, at intervals and after each operation."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from memsaver_server.fleet.fleet import AsyncFleet
from memsaver_server.fleet.members import Member, MembershipError
from memsaver_server.fleet.record import RecordError
from memsaver_server.fleet.results import FleetStatus

logger = logging.getLogger("memsaver")

#: Shortest interval between looks, seconds. A look may take a fifth of the time: that of many engines is rarer.
INTERVAL_S = 1.0
SHARE = 5
#: Readings that are kept for the dashboard.
KEPT = 900


@dataclass(frozen=True)
class Reading:
    """Device memory in use on all GPUs together, bytes; ``at`` is seconds since the epoch."""

    at: float
    used_bytes: int


class Observer:
    """Use it in one event loop.

    Attributes:
        status: the fleet as last seen.
        keys: the keys of the engines, by name.
        trouble: why the fleet cannot be looked at; empty if it can.
    """

    def __init__(self, fleet: AsyncFleet, engine_key: str | None, seen: Callable[[FleetStatus], None]) -> None:
        self._fleet = fleet
        self._engine_key = engine_key
        self._seen = seen
        self._lock = asyncio.Lock()
        self._looks = 0
        self.status = FleetStatus(state="", engines=[], wanted=[])
        self.members: dict[str, Member] = {}
        self.keys: dict[str, str | None] = {}
        self.trouble = "the engines have not been asked yet"
        self.readings: deque[Reading] = deque(maxlen=KEPT)

    async def look(self) -> None:
        """Return after a look that began after this call, its own or another caller's. Raises nothing."""
        begun = self._looks
        async with self._lock:
            if self._looks > begun:
                return
            self._looks += 1
            try:
                members = await self._fleet.membership.members()
                status = await self._fleet.status()
            except (MembershipError, RecordError) as error:
                self._complain(str(error))
                return
        self.trouble = ""
        self.status = status
        self.members = {member.name: member for member in members}
        self.keys.clear()
        self.keys.update({member.name: member.api_key or self._engine_key for member in members})
        self.readings.append(Reading(time.time(), _used_bytes(status)))
        self._seen(status)

    async def keep(self) -> None:
        """Look for ever."""
        while True:
            began = time.monotonic()
            await self.look()
            await asyncio.sleep(max(INTERVAL_S, (SHARE - 1) * (time.monotonic() - began)))

    def _complain(self, trouble: str) -> None:
        if trouble != self.trouble:
            logger.error("the fleet cannot be looked at: %s", trouble)
        self.trouble = trouble


def _used_bytes(status: FleetStatus) -> int:
    occupations = [engine.occupation for engine in status.engines if engine.occupation is not None]
    return sum({device.uuid: device.used_bytes for each in occupations for device in each.devices}.values())
