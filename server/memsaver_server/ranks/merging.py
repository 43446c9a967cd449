"""What the ranks report, merged: their devices, statuses, phases and tags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from memsaver_core.contract.model import summed, summed_by
from memsaver_core.contract.reports import DeviceDelta, OperationReport, PhaseReport, TagReport
from memsaver_core.contract.status import DeviceMemory, HostBackupStatus, SharedStoreStatus, Status, TagStatus
from memsaver_core.ranks.protocol import Introduction

_Tag = TypeVar("_Tag", TagReport, TagStatus)

#: The worst first: a group is in the state of its worst rank.
_STATES = ("failed", "releasing", "resuming", "released", "resident")


class RankDevices:
    """The devices of all ranks, numbered for the group: ranks may call different devices by the same index.
    ``readings`` has each device once, with the group's number as its index."""

    def __init__(self, introductions: Iterable[Introduction]) -> None:
        self.readings: list[DeviceMemory] = []
        self._numbers: list[dict[int, int]] = []  # by rank: the group's number of each of its indices
        by_uuid: dict[str, int] = {}
        for introduction in introductions:
            numbers = {}
            for device in introduction.devices:
                number = by_uuid.setdefault(device.uuid, len(by_uuid))
                if number == len(self.readings):
                    self.readings.append(device.model_copy(update={"index": number}))
                numbers[device.index] = number
            self._numbers.append(numbers)

    def number(self, rank: int, index: int) -> int:
        """Return the group's number of the device that ``rank`` calls ``index``; ``index`` if it is not introduced."""
        return self._numbers[rank].get(index, index)

    def note(self, rank: int, devices: Iterable[DeviceDelta]) -> None:
        """Note what ``rank`` counted on devices that it introduced; used where this process cannot read them."""
        for device in devices:
            if (number := self._numbers[rank].get(device.index)) is not None:
                used = {"used_bytes": device.used_after_bytes}
                self.readings[number] = self.readings[number].model_copy(update=used)

    def merged_status(self, statuses: Sequence[Status | None]) -> Status:
        """Merge what each rank holds; None is a rank that does not use memsaver."""
        known = [(rank, status) for rank, status in enumerate(statuses) if status is not None]
        if not known:
            return Status(enabled=False, driver="none", state="resident")
        tags = [self._renumbered(rank, tag) for rank, status in known for tag in status.tags]
        backups = [status.host_backup for _, status in known]
        reserved: Counter[int] = Counter()
        for rank, status in known:
            reserved.update({self.number(rank, index): size for index, size in status.reserved_by_device.items()})
        return Status(
            enabled=True,
            driver=known[0][1].driver,
            state=min((status.state for _, status in known), key=_STATES.index),
            failure="; ".join(f"rank {rank}: {status.failure}" for rank, status in known if status.failure),
            tags=merged_tags(tags),
            host_backup=summed(backups).model_copy(update={"shared_store": _merged_store(backups)}),
            reserved_by_device=reserved,
            hibernated=any(status.hibernated for _, status in known),
            communicators=tuple(each for _, status in known for each in status.communicators),
            shared=tuple(dict.fromkeys(each for _, status in known for each in status.shared)),
        )

    def merged_phases(self, ranks: Sequence[int], reports: Sequence[OperationReport]) -> list[PhaseReport]:
        """Merge the phases of ``ranks`` that did the same at the same time: each takes as long as its slowest rank."""
        merged = []
        for phases in zip(*(report.phases for report in reports), strict=False):
            devices: dict[int, DeviceDelta] = {}
            details: dict[str, float] = {}
            for rank, phase in zip(ranks, phases, strict=True):
                for device in phase.devices:
                    number = self.number(rank, device.index)
                    devices[number] = device.model_copy(update={"index": number})
                for name, value in phase.details.items():
                    joined: Callable[..., float] = max if "second" in name else lambda one, other: one + other
                    details[name] = joined(details[name], value) if name in details else value
            seconds, found = max(phase.seconds for phase in phases), tuple(devices.values())
            merged.append(PhaseReport(name=phases[0].name, seconds=seconds, devices=found, details=details))
        return merged

    def _renumbered(self, rank: int, tag: TagStatus) -> TagStatus:
        def by_number(by_index: Mapping[int, int]) -> dict[int, int]:
            return {self.number(rank, index): size for index, size in by_index.items()}

        names = ("mapped_by_device", "bytes_by_device", "shrunk_by_device")
        return tag.model_copy(update={name: by_number(getattr(tag, name)) for name in names})


def _merged_store(backups: Sequence[HostBackupStatus]) -> SharedStoreStatus | None:
    """The store that the ranks use, with the blocks of all of them; its own figures are the same for all."""
    stores = [backup.shared_store for backup in backups if backup.shared_store is not None]
    if not stores:
        return None
    held, share = sum(store.held_bytes for store in stores), sum(store.share_bytes for store in stores)
    return stores[0].model_copy(update={"held_bytes": held, "share_bytes": share})


def merged_tags(tags: Iterable[_Tag]) -> tuple[_Tag, ...]:
    """Merge what is about the same tag, which is in the state of its worst rank."""
    states: dict[str, str] = {}
    rows = list(tags)
    for each in rows:
        states[each.tag] = min(each.state, states.get(each.tag, each.state), key=_STATES.index)
    return tuple(each.model_copy(update={"state": states[each.tag]}) for each in summed_by(rows, "tag"))
