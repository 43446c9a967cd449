"""Breaks a device's memory in use down by consumer: tags, torch outside regions, this process, other processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from memsaver_core.reports import DeviceMemory
from memsaver_server.device_monitor import Sample

Kind = Literal["tag", "torch", "cache", "graphs", "process", "reserved", "others", "unexplained"]


@dataclass(frozen=True)
class Consumer:
    """One consumer of device memory.

    Attributes:
        kind: ``tag``: a region, including free ranges inside its chunks. ``torch``: tensors outside regions. ``cache``:
            torch's cache outside regions. ``graphs``: captured CUDA graphs, besides their tensors. ``reserved``: held
            for a resume that is prepared. ``process``: the rest of this process: context, modules, libraries.
            ``others``: other processes. ``unexplained``: the rest, if the driver does not count per process.
        name: the tag, or a description of the kind.
    """

    kind: Kind
    name: str
    bytes: int


def break_down(device: DeviceMemory, sample: Sample) -> list[Consumer]:
    """Return the consumers of ``device``. Their sum is always ``device.used_bytes``."""
    status = sample.status
    used = device.used_bytes
    if status is not None and status.driver == "host":
        # A host device holds only regions; its process_bytes are the process's resident pages, which it does not hold.
        own = _cut(_regions(device, sample), used)
        return [*own, Consumer("others", "other processes", used - _sum(own))]
    found = [*_regions(device, sample), *_outside_regions(device, sample)]
    rest = "context and modules"
    rest += ", NCCL" if sample.nccl else ""
    rest += ", torch outside regions" if device.index not in sample.torch else ""
    if status is not None and status.hibernated:
        found = [replace(consumer, bytes=0) for consumer in found]
        rest = "what the driver keeps of a hibernated process"
    if device.process_bytes is None:
        own = _cut(found, used)
        return [*own, Consumer("unexplained", f"{rest}, other processes", used - _sum(own))]
    process = min(device.process_bytes, used)
    own = _cut(found, process)
    own.append(Consumer("process", rest, process - _sum(own)))
    return [*own, Consumer("others", "other processes", used - process)]


def _regions(device: DeviceMemory, sample: Sample) -> list[Consumer]:
    tags = sample.status.tags if sample.status is not None else ()
    hibernated = sample.status is not None and sample.status.hibernated
    found = [Consumer("tag", tag.tag, 0 if hibernated else tag.mapped_by_device.get(device.index, 0)) for tag in tags]
    reserved = sample.status.reserved_by_device.get(device.index, 0) if sample.status is not None else 0
    return [*found, Consumer("reserved", "reserved for a resume", reserved)] if reserved else found


def _outside_regions(device: DeviceMemory, sample: Sample) -> list[Consumer]:
    """Return torch's memory outside regions, and the graphs'."""
    tags = sample.status.tags if sample.status is not None else ()
    graphs = Consumer("graphs", "captured graphs, beside their tensors", sample.graph_bytes.get(device.index, 0))
    torch = sample.torch.get(device.index)
    if torch is None:
        return [graphs]
    # torch counts a region's segments even while they are unmapped.
    in_regions = sum(tag.bytes_by_device.get(device.index, 0) for tag in tags)
    outside = max(0, torch.reserved_bytes - in_regions)
    if torch.cached_bytes is None:
        return [Consumer("torch", "torch outside regions, and its cache", outside), graphs]
    cached = min(torch.cached_bytes, outside)
    return [
        Consumer("torch", "torch outside regions", outside - cached),
        Consumer("cache", "torch's cache", cached),
        graphs,
    ]


def _sum(found: list[Consumer]) -> int:
    return sum(consumer.bytes for consumer in found)


def _cut(found: list[Consumer], limit: int) -> list[Consumer]:
    """Limit the sum to ``limit``: the counts were not taken at the same instant."""
    cut = []
    for consumer in found:
        size = max(0, min(consumer.bytes, limit))
        limit -= size
        cut.append(replace(consumer, bytes=size))
    return cut
