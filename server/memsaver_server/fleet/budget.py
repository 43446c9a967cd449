"""The order of resumes on GPUs that engines share, so that no two of them need the same bytes at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memsaver_core.contract.phases import Phase
from memsaver_core.contract.reports import DeviceRoom
from memsaver_core.contract.requests import AskedOfFleet
from memsaver_core.contract.status import OccupationAnswer
from memsaver_server.fleet.connection import EngineFailure
from memsaver_server.fleet.parts import Part


@dataclass
class Gpu:
    """What resumes need of one GPU together, by the engines' own counts, bytes."""

    free_bytes: int
    needs: dict[str, int] = field(default_factory=dict)  # by name of the engine
    elastic: bool = False  # one of them can come back with a smaller KV cache

    @property
    def is_short(self) -> bool:
        return len(self.needs) > 1 and sum(self.needs.values()) > self.free_bytes

    def shortage(self, uuid: str) -> str:
        each = ", ".join(f"{name} {size}" for name, size in sorted(self.needs.items()))
        smaller = ', or send "fleet_mode": "best_effort" with "kv_cache": "shrink"' if self.elastic else ""
        return (
            f"GPU {uuid}: {sum(self.needs.values())} bytes are needed ({each}), {self.free_bytes} are free. "
            f"Free memory there, or select fewer engines{smaller}"
        )


async def groups_of(request: AskedOfFleet, parts: Sequence[Part]) -> list[list[Part]]:
    """Return the parts in groups: those of one group in turn, groups side by side.

    Resumes that fit together, and other operations, are groups of one. Those that do not are in one group; in mode
    ``all``, unless they may wait for memory, they fail here, before anything is prepared.
    """
    if request.operation != "resume":
        return [[part] for part in parts]
    short = {uuid: gpu for uuid, gpu in (await _needs(request, parts)).items() if gpu.is_short}
    if request.fleet_mode == "all" and not request.patience_s(Phase.WAIT_FOR_MEMORY):
        for uuid, gpu in short.items():
            _refuse(uuid, gpu, parts)
    return _joined(parts, [set(gpu.needs) for gpu in short.values()])


def uuids_of(occupation: OccupationAnswer | None) -> tuple[str, ...]:
    return tuple(device.uuid for device in occupation.devices) if occupation is not None else ()


async def _needs(request: AskedOfFleet, parts: Sequence[Part]) -> dict[str, Gpu]:
    """Return what is needed of each GPU that several engines use."""
    users = Counter(uuid for part in parts for uuid in uuids_of(part.before))
    gpus: dict[str, Gpu] = {}

    async def count(part: Part) -> None:
        if part.before is None or all(users[uuid] < 2 for uuid in uuids_of(part.before)):
            return
        try:
            plan = await part.connection.plan("resume", request.tags)
        except EngineFailure as failure:
            part.fail("preparing", failure)
            return
        add_needs(gpus, part.member.name, part.before, plan.devices)

    await asyncio.gather(*map(count, parts))
    return gpus


def add_needs(gpus: dict[str, Gpu], name: str, now: OccupationAnswer, rooms: Iterable[DeviceRoom]) -> None:
    """Add what an engine that is ``now`` so needs of each GPU, by its own plan."""
    uuids = {device.index: device.uuid for device in now.devices}
    for room in rooms:
        if room.needed_bytes and room.index in uuids:
            gpu = gpus.setdefault(uuids[room.index], Gpu(room.free_bytes))
            gpu.free_bytes = min(gpu.free_bytes, room.free_bytes)
            gpu.needs[name] = room.needed_bytes
            gpu.elastic |= now.kv_cache is not None


def _refuse(uuid: str, gpu: Gpu, parts: Sequence[Part]) -> None:
    for part in parts:
        if part.member.name in gpu.needs:
            part.fail("preparing", EngineFailure("out_of_device_memory", gpu.shortage(uuid)))


def _joined(parts: Sequence[Part], crowds: Sequence[set[str]]) -> list[list[Part]]:
    """Return groups such that engines of one crowd, directly or through others, are in one group."""
    sets: list[set[str]] = []
    for crowd in crowds:
        touching = [each for each in sets if each & crowd]
        sets = [each for each in sets if not each & crowd] + [crowd.union(*touching)]
    groups = [[part for part in parts if part.member.name in names] for names in sets]
    alone = set().union(*sets) if sets else set()
    return groups + [[part] for part in parts if part.member.name not in alone]
