"""What holds a device's memory: the tags, torch outside of them, the rest of this process, and everybody else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from memsaver_core.reports import DeviceMemory
from memsaver_server.device_monitor import Reading

Kind = Literal["tag", "torch", "cache", "graphs", "process", "others", "unexplained"]


@dataclass(frozen=True)
class Source:
    """One holder of memory.

    Attributes:
        kind: ``tag``: a region, free ranges inside its chunks included. ``torch``: tensors outside of regions.
            ``cache``: what torch only caches outside of regions. ``graphs``: what captured CUDA graphs hold beside
            their tensors. ``process``: what else this process has: its context, modules, libraries. ``others``: other
            processes. ``unexplained``: what is left where the driver does not tell processes apart.
        name: the tag's name, or words for the kind.
    """

    kind: Kind
    name: str
    bytes: int


def sources(device: DeviceMemory, reading: Reading) -> list[Source]:
    """Split what is in use on ``device`` by who holds it. The sum is the device's own count, always."""
    status = reading.status
    used = device.used_bytes
    if status is not None and status.driver == "host":
        # A host device holds regions alone; a process's bytes there are its resident pages, which are not the device's.
        own = _cut(_regions(device, reading), used)
        return [*own, Source("others", "other processes", used - _sum(own))]
    found = [*_regions(device, reading), *_outside(device, reading)]
    rest = "context and modules"
    rest += ", NCCL" if reading.nccl else ""
    rest += ", torch outside regions" if device.index not in reading.torch else ""
    if status is not None and status.hibernated:
        found = [replace(source, bytes=0) for source in found]
        rest = "what the driver keeps of a hibernated process"
    if device.process_bytes is None:
        own = _cut(found, used)
        return [*own, Source("unexplained", f"{rest}, other processes", used - _sum(own))]
    process = min(device.process_bytes, used)
    own = _cut(found, process)
    own.append(Source("process", rest, process - _sum(own)))
    return [*own, Source("others", "other processes", used - process)]


def _regions(device: DeviceMemory, reading: Reading) -> list[Source]:
    tags = reading.status.tags if reading.status is not None else ()
    away = reading.status is not None and reading.status.hibernated
    return [Source("tag", tag.tag, 0 if away else tag.mapped_by_device.get(device.index, 0)) for tag in tags]


def _outside(device: DeviceMemory, reading: Reading) -> list[Source]:
    """Torch beside the regions, and the graphs."""
    tags = reading.status.tags if reading.status is not None else ()
    graphs = Source("graphs", "captured graphs, beside their tensors", reading.graph_bytes.get(device.index, 0))
    torch = reading.torch.get(device.index)
    if torch is None:
        return [graphs]
    # torch counts a region's segments whether they are mapped or not.
    in_regions = sum(tag.bytes_by_device.get(device.index, 0) for tag in tags)
    outside = max(0, torch.reserved_bytes - in_regions)
    if torch.cached_bytes is None:
        return [Source("torch", "torch outside regions, and its cache", outside), graphs]
    cached = min(torch.cached_bytes, outside)
    return [
        Source("torch", "torch outside regions", outside - cached),
        Source("cache", "torch's cache", cached),
        graphs,
    ]


def _sum(found: list[Source]) -> int:
    return sum(source.bytes for source in found)


def _cut(found: list[Source], limit: int) -> list[Source]:
    """Give each source at most what is left of ``limit``: the accounts are not taken at the same instant."""
    cut = []
    for source in found:
        size = max(0, min(source.bytes, limit))
        limit -= size
        cut.append(replace(source, bytes=size))
    return cut
