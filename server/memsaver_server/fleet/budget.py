"""What engines need together: the order of resumes on GPUs that they share, so that no two of them need the same bytes
at once, and what a dry run says of GPUs and disks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memsaver_core.contract.phases import Phase
from memsaver_core.contract.reports import DeviceRoom, Room
from memsaver_core.contract.requests import AskedOfFleet
from memsaver_core.contract.status import OccupationAnswer
from memsaver_server.fleet.connection import EngineFailure
from memsaver_server.fleet.parts import Part


@dataclass
class Place:
    """What engines together need of one GPU or disk, by their own counts, bytes."""

    free_bytes: int
    needs: dict[str, int] = field(default_factory=dict)  # by name of the engine
    elastic: bool = False  # one of them can come back with a smaller KV cache

    @property
    def is_short(self) -> bool:
        return len(self.needs) > 1 and sum(self.needs.values()) > self.free_bytes

    def add(self, name: str, room: Room) -> None:
        self.free_bytes = min(self.free_bytes, room.free_bytes)
        self.needs[name] = room.needed_bytes

    def shortage(self, where: str) -> str:
        each = ", ".join(f"{name} {size}" for name, size in sorted(self.needs.items()))
        smaller = ', or send "fleet_mode": "best_effort" with "kv_cache": "shrink"' if self.elastic else ""
        return (
            f"{where}: {sum(self.needs.values())} bytes are needed ({each}), {self.free_bytes} are free. "
            f"Free memory there, or select fewer engines{smaller}"
        )


async def groups_of(request: AskedOfFleet, parts: Sequence[Part]) -> list[list[Part]]:
    """Return the parts in groups: the parts of a group act one after another, the groups at the same time.

    A resume that fits beside the others, and each part of another operation, is a separate group. Resumes that do not
    fit together are one group; in mode ``all``, unless they may wait for memory, they fail here: nothing is prepared.
    """
    if request.operation != "resume":
        return [[part] for part in parts]
    short = {where: gpu for where, gpu in (await _needs(request, parts)).items() if gpu.is_short}
    if request.fleet_mode == "all" and not request.patience_s(Phase.WAIT_FOR_MEMORY):
        for where, gpu in short.items():
            for part in parts:
                if part.member.name in gpu.needs:
                    part.fail("preparing", EngineFailure("out_of_device_memory", gpu.shortage(where)))
    return _grouped(parts, [set(gpu.needs) for gpu in short.values()])


def uuids_of(occupation: OccupationAnswer | None) -> tuple[str, ...]:
    return tuple(device.uuid for device in occupation.devices) if occupation is not None else ()


async def _needs(request: AskedOfFleet, parts: Sequence[Part]) -> dict[str, Place]:
    """Return what is needed of each GPU that several engines use."""
    users = Counter(uuid for part in parts for uuid in uuids_of(part.before))
    gpus: dict[str, Place] = {}

    async def count(part: Part) -> None:
        if part.before is None or all(users[uuid] < 2 for uuid in uuids_of(part.before)):
            return
        with part.failing("preparing"):
            plan = await part.connection.plan("resume", request.tags)
            add_needs(gpus, part.member.name, part.before, plan.devices)

    await asyncio.gather(*map(count, parts))
    return gpus


def add_needs(gpus: dict[str, Place], name: str, now: OccupationAnswer, rooms: Iterable[DeviceRoom]) -> None:
    """Add what an engine, which holds ``now``, needs of each GPU, by the ``rooms`` of its plan."""
    uuids = {device.index: device.uuid for device in now.devices}
    for room in rooms:
        if room.needed_bytes and room.index in uuids:
            gpu = gpus.setdefault(f"GPU {uuids[room.index]}", Place(room.free_bytes))
            gpu.add(name, room)
            gpu.elastic |= now.kv_cache is not None


def _grouped(parts: Sequence[Part], crowds: Sequence[set[str]]) -> list[list[Part]]:
    """Return groups such that engines of one crowd, directly or through others, are in one group."""
    sets: list[set[str]] = []
    for crowd in crowds:
        touching = [each for each in sets if each & crowd]
        sets = [each for each in sets if not each & crowd] + [crowd.union(*touching)]
    groups = [[part for part in parts if part.member.name in names] for names in sets]
    alone = set().union(*sets) if sets else set()
    return groups + [[part] for part in parts if part.member.name not in alone]
