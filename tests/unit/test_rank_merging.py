"""The reports of an engine's ranks, merged."""

from __future__ import annotations

from memsaver_core.contract.reports import DeviceDelta
from memsaver_core.contract.status import DeviceMemory, Status, TagStatus
from memsaver_core.ranks.protocol import Introduction
from memsaver_server.ranks.merging import RankDevices


def device(index: int, uuid: str) -> DeviceMemory:
    return DeviceMemory(index=index, uuid=uuid, name="", total_bytes=100, used_bytes=10, process_bytes=None)


def counted(index: int, used: int) -> DeviceDelta:
    return DeviceDelta(index=index, uuid="", used_before_bytes=0, used_after_bytes=used, delta_bytes=used)


def test_a_device_that_a_rank_did_not_introduce_changes_no_other() -> None:
    devices = RankDevices([Introduction(devices=(device(0, "a"),)), Introduction(devices=(device(0, "b"),))])
    devices.note(1, [counted(0, 20), counted(1, 30), counted(7, 40)])
    assert [(each.uuid, each.used_bytes) for each in devices.readings] == [("a", 10), ("b", 20)]
    sizes = {name: 0 for name, field in TagStatus.model_fields.items() if field.annotation is int}
    tag = TagStatus(tag="weights", state="resident", restore="host", mapped_by_device={0: 1, 7: 2}, **sizes)
    status = Status(enabled=True, driver="host", state="resident", tags=(tag,), reserved_by_device={0: 4, 7: 5})
    merged = devices.merged_status([None, status])
    assert merged.tags[0].mapped_by_device == {1: 1, 7: 2}
    assert merged.reserved_by_device == {1: 4, 7: 5}
