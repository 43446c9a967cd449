"""The states of the engines: read once for all readers, at intervals and after each operation."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from memsaver_core.contract.errors import FleetUnknownError
from memsaver_core.contract.model import common, summed, summed_by
from memsaver_core.contract.status import (
    AdmissionStatus,
    Consumer,
    EngineRow,
    HostBackup,
    OccupiedDevice,
    TagOccupation,
)
from memsaver_server import clock
from memsaver_server.fleet.fleet import AsyncFleet
from memsaver_server.fleet.members import Member
from memsaver_server.fleet.parts import Part
from memsaver_server.fleet.record import RecordContent
from memsaver_server.fleet.results import EngineStatus, FleetOccupationAnswer, FleetStatus, count_of

logger = logging.getLogger("memsaver")

#: Shortest interval between looks, seconds; and the interval in multiples of the time that a look takes, which grows
#: with the number of engines.
INTERVAL_S = 1.0
SHARE = 5
#: How long a reader waits for a look, seconds.
GLANCE_S = 1.0
#: Readings that are kept for the dashboard.
KEPT = 900


class Observer:
    """Reads the engines' states; ``status`` and ``members`` are the last ones. Use it in one event loop."""

    def __init__(self, fleet: AsyncFleet, engine_key: str | None) -> None:
        self._fleet = fleet
        self._roster = fleet.roster
        self._engine_key = engine_key
        self.seen: Callable[[FleetStatus], None] = lambda _: None  # is given each status
        self._looking: asyncio.Task[None] | None = None
        self._took_s = 0.0
        self._record = RecordContent()
        self._engines: dict[str, tuple[float, EngineStatus]] = {}  # with the time at which the look began
        self.status = FleetStatus(state="", engines=[], wanted=[], demands=[])
        self.members: dict[str, Member] = {}
        self.keys: dict[str, str | None] = {}  # of the engines, by name
        self.trouble = ""  # why members or record cannot be read, so that ``status`` is old; empty if they can
        #: Device memory in use on all GPUs together, bytes; ``at`` is seconds since the epoch.
        self.readings: deque[dict[str, Any]] = deque(maxlen=KEPT)

    async def glance(self) -> None:
        """Look, and return after ``GLANCE_S`` at the latest; what is not read by then keeps its last status."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self.look())
        await asyncio.wait({self._looking}, timeout=GLANCE_S)

    async def look(self, names: Iterable[str] | None = None) -> None:
        """Look at the engines ``names`` and those that share a GPU with them; None: at all of them. Raises nothing.

        It does not wait for engines that are silent: they are as last seen until they answer.
        """
        began = clock.monotonic()
        try:
            trouble = await self._read()
            named = set(names or ())
            near = self.members.keys() if names is None else self._near(named)
            members = [member for name, member in self.members.items() if name in near]
            asks = [(member, *self._roster.asking(member, anew=member.name in named)) for member in members]
            await self._roster.until_answered((member, ask) for member, _, ask in asks)
            for _, at, ask in asks:
                if ask.done():
                    self._take(at, ask)
                else:
                    ask.add_done_callback(partial(self._late, at))
        except Exception as error:  # the next look may succeed; until then nothing that was seen counts
            self._note(f"internal error, {type(error).__name__}: {error}", error)
            return
        self._note(trouble)
        self._took_s = clock.monotonic() - began
        self._show()
        if names is None:
            seen = [engine.occupation for engine in self.status.engines if engine.occupation is not None]
            used = {device.uuid: device.used_bytes for each in seen for device in each.devices}
            self.readings.append({"at": time.time(), "used_bytes": {0: sum(used.values())}})

    def failure(self, name: str) -> str:
        """Return why an engine does not answer; empty if it did when it was asked last."""
        seen = next((each for each in self.status.engines if each.name == name), None)
        return "it is no member any more" if seen is None else "" if seen.alive else seen.error

    def occupation(self, running: str | None, requests: Mapping[str, int]) -> FleetOccupationAnswer:
        """Return what the engines hold together, and a row for each. ``running`` is the oldest operation that runs,
        ``requests`` are those in flight through this coordinator, by engine."""
        status = self.status
        silence = {name: self._roster.connection(member).silent_s for name, member in self.members.items()}
        seen = [engine.occupation for engine in status.engines if engine.occupation is not None]
        is_open = any(one.admission.open for one in seen)
        reason = self.trouble or ("" if is_open else "no engine accepts requests")
        backup = summed([HostBackup(prepared=bool(seen)), *(one.host_backup for one in seen)])
        hosts = {one.host_id: one.host_bytes for one in seen}
        limits: Counter[str] = Counter()
        for one in seen:
            limits[one.host_id] += one.host_backup.limit_bytes
        return FleetOccupationAnswer(
            enabled=not seen or any(one.enabled for one in seen),
            driver=common(one.driver for one in seen),
            state=status.state,
            hibernated=bool(seen) and all(one.hibernated for one in seen),
            engine=f"fleet of {len(status.engines)}",
            model=", ".join(sorted({engine.model for engine in status.engines if engine.model})),
            admission=AdmissionStatus(open=not reason, reason=reason),
            operation_id=running,
            updating=any(one.updating for one in seen),
            tags=_tags(status),
            devices=_devices(status),
            # Each engine may use most of its host, and together they have no more than that.
            host_backup=backup.model_copy(
                update={"limit_bytes": sum(min(limits[host], size or sys.maxsize) for host, size in hosts.items())}
            ),
            host_bytes=sum(hosts.values()),
            engines=tuple(_row(one, requests.get(one.name, 0), silence.get(one.name, 0.0)) for one in status.engines),
            wanted=tuple(status.wanted),
            demands=tuple(status.demands),
            progress=status.progress,
            error=self.trouble,
        )

    async def keep(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(max(INTERVAL_S, (SHARE - 1) * self._took_s))

    async def _read(self) -> str:
        """Read the record, then the members; return why one cannot be read, which then stays as last read."""
        try:
            self._record = await self._fleet.record()
            self.members = {member.name: member for member in await self._roster.members()}
        except FleetUnknownError as error:
            return str(error)
        return ""

    def _take(self, at: float, ask: asyncio.Task[Part]) -> None:
        """Store the result of a look at one engine, unless that of a later look is stored already."""
        if not ask.cancelled():
            part = ask.result()
            name = part.member.name
            if name not in self._engines or self._engines[name][0] <= at:
                self._engines[name] = at, part.status(self._record)

    def _late(self, at: float, ask: asyncio.Task[Part]) -> None:
        self._take(at, ask)
        self._show()

    def _show(self) -> None:
        # Engines that have left, or have another address now, are dropped: a key is sent to its own address alone.
        for name, (_, seen) in list(self._engines.items()):
            if name not in self.members or self.members[name].url != seen.url:
                del self._engines[name]
        self.keys = {name: member.api_key or self._engine_key for name, member in self.members.items()}
        engines = [
            self._engines[each.name][1]
            if each.name in self._engines
            else EngineStatus.of(each, None, "it has not answered yet", self._record)
            for each in self._roster.one_each(self.members.values())
        ]
        self.status = FleetStatus.of(engines, self._record, self._fleet.progress)
        self.seen(self.status)

    def _near(self, names: set[str]) -> set[str]:
        gpus = {gpu for engine in self.status.engines if engine.name in names for gpu in engine.gpus}
        return names | {engine.name for engine in self.status.engines if gpus & set(engine.gpus)}

    def _note(self, trouble: str, bug: Exception | None = None) -> None:
        if trouble and trouble != self.trouble:
            logger.error("the states of the engines cannot be read: %s", trouble, exc_info=bug)
        elif self.trouble and not trouble:
            logger.warning("the states of the engines can be read again")
        self.trouble = trouble


def _devices(status: FleetStatus) -> tuple[OccupiedDevice, ...]:
    """Return the GPUs of the fleet, each once, with what all its engines together hold of it."""
    found: dict[str, OccupiedDevice] = {}
    held: dict[str, list[Consumer]] = {}
    for engine in status.engines:
        for device in engine.occupation.devices if engine.occupation else ():
            found[device.uuid] = device
            held.setdefault(device.uuid, []).extend(device.sources)
    of_all = {uuid: {"process_bytes": None, "sources": _own(held[uuid], found[uuid].used_bytes)} for uuid in found}
    return tuple(each.model_copy(update={"index": n, **of_all[uuid]}) for n, (uuid, each) in enumerate(found.items()))


def total(gpus: Sequence[OccupiedDevice]) -> list[dict[str, Any]]:
    """Return all GPUs as one device, as JSON, for one chart."""
    if not gpus:
        return []
    sources = summed_by((source for gpu in gpus for source in gpu.sources), "kind", "name")
    whole = {"index": 0, "uuid": "", "name": count_of(gpus, "device"), "sources": sources}
    return [summed(gpus).model_copy(update=whole).model_dump(mode="json")]


def _own(sources: Iterable[Consumer], used: int) -> tuple[Consumer, ...]:
    """Return the consumers that engines count as theirs, and the rest."""
    own = summed_by((each for each in sources if each.kind not in ("others", "unexplained")), "kind", "name")
    rest = max(0, used - sum(each.bytes for each in own))
    return (*own, Consumer(kind="others", name="other processes", bytes=rest))


def _row(engine: EngineStatus, requests: int, silent_s: float) -> EngineRow:
    silent = f"no answer for {silent_s:.0f} s" if silent_s else ""
    return EngineRow(
        **engine.model_dump(exclude={"occupation", "error"}),
        error=engine.error or silent,
        resident_bytes=engine.resident_bytes,
        released_bytes=engine.released_bytes,
        requests=requests,
    )


def _tags(status: FleetStatus) -> tuple[TagOccupation, ...]:
    tags = (tag for engine in status.engines for tag in engine.tags)
    together = summed_by(sorted(tags, key=lambda tag: tag.tag), "tag")
    return tuple(tag.model_copy(update={"content": "ok" if tag.content == "ok" else "lost"}) for tag in together)
