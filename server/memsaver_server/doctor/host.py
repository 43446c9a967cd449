"""Checks of the host driver and of host memory, which holds backups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from memsaver_server.doctor.finding import Finding, Level, Machine


def check_host_driver(machine: Machine) -> Iterator[Finding]:
    from memsaver_core.settings import CoreSettings

    settings = CoreSettings()
    limit = _cgroup_limit_bytes()
    size = int(settings.host_capacity) or _total_memory_bytes() // 2
    names = [name for name in settings.host_device.split(",") if name]
    shared = f"shared by all processes that name {' or '.join(names)}" if names else "private to each process"
    found = f"capacity {size / 2**30:.1f} GiB{'' if settings.host_capacity else ' (half of RAM)'}, {shared}"
    if limit is not None and size > limit:
        yield Finding(
            "host driver",
            Level.WARNING,
            f"{found}, but this container is limited to {limit / 2**30:.1f} GiB",
            "set MEMSAVER_HOST_CAPACITY below the container's limit",
        )
    else:
        yield Finding("host driver", Level.OK, found)


def check_host_memory(machine: Machine) -> Iterator[Finding]:
    available = _meminfo_bytes("MemAvailable")
    limit = _cgroup_limit_bytes()
    found = f"{available / 2**30:.1f} GiB available of {_total_memory_bytes() / 2**30:.1f} GiB"
    if limit is not None:
        found += f", container limit {limit / 2**30:.1f} GiB"
    yield Finding("host memory", Level.OK, f"{found}; it holds the backups of tags that keep their content")


def _total_memory_bytes() -> int:
    return _meminfo_bytes("MemTotal")


def _meminfo_bytes(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise LookupError(f"/proc/meminfo has no {key}")


def _cgroup_limit_bytes() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < _total_memory_bytes():
            return int(text)
    return None
