"""Breaks a device's memory in use down by consumer: tags, torch outside regions, this process, other processes."""

from __future__ import annotations

from typing import Any

from memsaver_core.contract.status import Consumer, DeviceMemory
from memsaver_server.engine.device_monitor import Sample


def _held(kind: Any, name: str, size: int) -> Consumer:
    return Consumer(kind=kind, name=name, bytes=size)


def break_down(device: DeviceMemory, sample: Sample) -> list[Consumer]:
    """Return the consumers of ``device``. Their sum is always ``device.used_bytes``."""
    status = sample.status
    used = device.used_bytes
    if status.driver == "host":
        # A host device holds only regions; its process_bytes are the process's resident pages, which it does not hold.
        own, left = _cut(_regions(device, sample), used)
        return [*own, _held("others", "other processes", left)]
    found = [*_regions(device, sample), *_outside_regions(device, sample)]
    rest = "context and modules"
    rest += ", NCCL" if sample.nccl else ""
    rest += ", torch outside regions" if device.index not in sample.torch else ""
    if status.hibernated:
        found = [consumer.model_copy(update={"bytes": 0}) for consumer in found]
        rest = "what the driver keeps of a hibernated process"
    if device.process_bytes is None:
        own, left = _cut(found, used)
        return [*own, _held("unexplained", f"{rest}, other processes", left)]
    process = min(device.process_bytes, used)
    own, left = _cut(found, process)
    return [*own, _held("process", rest, left), _held("others", "other processes", used - process)]


def _regions(device: DeviceMemory, sample: Sample) -> list[Consumer]:
    status, index = sample.status, device.index
    mapped = {tag.tag: 0 if status.hibernated else tag.mapped_by_device.get(index, 0) for tag in status.tags}
    found = [_held("tag", tag, size) for tag, size in mapped.items()]
    reserved = status.reserved_by_device.get(index, 0)
    return [*found, _held("reserved", "reserved for a resume", reserved)] if reserved else found


def _outside_regions(device: DeviceMemory, sample: Sample) -> list[Consumer]:
    """Return torch's memory outside regions, and the graphs'."""
    graphs = _held("graphs", "captured graphs, beside their tensors", sample.graph_bytes.get(device.index, 0))
    torch = sample.torch.get(device.index)
    if torch is None:
        return [graphs]
    # torch counts a region's segments even while they are unmapped.
    in_regions = sum(tag.bytes_by_device.get(device.index, 0) for tag in sample.status.tags)
    outside = max(0, torch.reserved_bytes - in_regions)
    if torch.cached_bytes is None:
        return [_held("torch", "torch outside regions, and its cache", outside), graphs]
    cached = min(torch.cached_bytes, outside)
    own = _held("torch", "torch outside regions", outside - cached)
    return [own, _held("cache", "torch's cache", cached), graphs]


def _cut(found: list[Consumer], limit: int) -> tuple[list[Consumer], int]:
    """Limit the sum to ``limit``, as the counts were not taken at the same instant; also return what is left of it."""
    cut = []
    for consumer in found:
        size = max(0, min(consumer.bytes, limit))
        limit -= size
        cut.append(consumer.model_copy(update={"bytes": size}))
    return cut, limit
