"""What holds a device's memory: the tags, torch outside of them, the rest of this process, and everybody else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from memsaver_core.reports import DeviceMemory
from memsaver_server.readings import Reading

Kind = Literal["tag", "torch", "process", "others", "unexplained"]


@dataclass(frozen=True)
class Source:
    """One holder of memory.

    Attributes:
        kind: ``tag``: a region, free ranges inside its chunks included. ``torch``: tensors outside of regions, and
            torch's cache. ``process``: what else this process has: its context, modules, libraries. ``others``: other
            processes. ``unexplained``: what is left where the driver does not tell processes apart.
        name: the tag's name, or words for the kind.
    """

    kind: Kind
    name: str
    bytes: int


def sources(device: DeviceMemory, reading: Reading) -> list[Source]:
    """Split what is in use on ``device`` by who holds it. The sum is the device's own count, always."""
    tags = reading.status.tags if reading.status is not None else ()
    found = [Source("tag", tag.tag, tag.mapped_by_device.get(device.index, 0)) for tag in tags]
    on_host = reading.status is not None and reading.status.driver == "host"
    # A host device holds regions alone; a process's bytes there are its resident pages, which are not the device's.
    process = None if on_host else device.process_bytes
    rest = "context and libraries"
    if not on_host:
        outside = _torch_outside(device.index, reading)
        if outside is None:
            rest = "context, libraries and torch outside regions"
        else:
            found.append(Source("torch", "torch outside regions", outside))
    if process is not None:
        found.append(Source("process", rest, process - sum(source.bytes for source in found)))
    if on_host or process is not None:
        found.append(Source("others", "other processes", device.used_bytes))
    else:
        found.append(Source("unexplained", f"{rest}, other processes", device.used_bytes))
    return _cut(found, device.used_bytes)


def _torch_outside(index: int, reading: Reading) -> int | None:
    """What torch's allocator holds outside of regions; None where it cannot be told apart from what is in them."""
    if len(reading.devices) != 1:
        # torch counts a region's segments whether they are mapped or not, and the core tells their sum alone.
        return None
    tags = reading.status.tags if reading.status is not None else ()
    return max(0, reading.torch_bytes.get(index, 0) - sum(tag.bytes for tag in tags))


def _cut(found: list[Source], used_bytes: int) -> list[Source]:
    """Give each source at most what is left of the device's count: the accounts are not taken at the same instant."""
    left = used_bytes
    cut = []
    for source in found:
        size = max(0, min(source.bytes, left))
        left -= size
        cut.append(Source(source.kind, source.name, size))
    return cut
