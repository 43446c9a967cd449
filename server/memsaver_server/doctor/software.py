"""Checks of Python, torch, settings, the saver, and the host's memory, which holds backups."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from memsaver_server.doctor.finding import Finding, Level, Machine

_MIN_TORCH = (2, 6)


def check_python(machine: Machine) -> Iterator[Finding]:
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if (3, 10) <= sys.version_info[:2] < (3, 15):
        yield Finding("python", Level.OK, found)
    else:
        yield Finding("python", Level.BLOCKED, found, "use Python 3.10 to 3.14")


def check_torch(machine: Machine) -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", Level.BLOCKED, f"not importable: {error}", "pip install 'torch>=2.6'")
        return
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if numbers < _MIN_TORCH:
        yield Finding("torch", Level.BLOCKED, torch.__version__, "memsaver needs torch 2.6 or newer")
    elif machine.has_gpu and torch.version.cuda is None:
        found = f"{torch.__version__}, a build without CUDA, on a machine with a GPU"
        remedy = "install torch's CUDA build, or set MEMSAVER_DRIVER=host to run without the GPU"
        yield Finding("torch", Level.BLOCKED, found, remedy)
    elif machine.has_gpu and not torch.cuda.is_available():
        found = f"{torch.__version__} for CUDA {torch.version.cuda}, but torch sees no device"
        remedy = "the driver is too old for this build, or CUDA_VISIBLE_DEVICES hides the devices"
        yield Finding("torch", Level.BLOCKED, found, remedy)
    else:
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
        yield Finding("torch", Level.OK, f"{torch.__version__}, {build}")


def check_core(machine: Machine) -> Iterator[Finding]:
    try:
        import memsaver_core
    except ImportError as error:
        yield Finding("native module", Level.BLOCKED, f"not importable: {error}", "build it: pip install -e .")
        return
    if not memsaver_core.enabled():
        remedy = "unset MEMSAVER_ENABLED, or set it to 1"
        yield Finding("saver", Level.WARNING, "disabled: release and resume change nothing", remedy)
        return
    from memsaver_core.process import backend

    if backend().name == "none":
        yield Finding("saver", Level.BLOCKED, "no driver works", "see the findings on CUDA and the host driver")
    elif backend().has_context:
        yield Finding("saver", Level.OK, "enabled, on the CUDA driver")
    else:
        why = "" if machine.has_gpu else "; there is no GPU here"
        yield Finding("saver", Level.OK, f"enabled, on the host driver{why}")


def check_hibernation(machine: Machine) -> Iterator[Finding]:
    from memsaver_core import hibernation_obstacles
    from memsaver_core.process import backend

    if obstacles := hibernation_obstacles():
        yield Finding("hibernation", Level.NOTE, "not possible: " + "; ".join(obstacles))
    else:
        limits = ", unless the engine uses NCCL, CUDA IPC, managed memory or peer access"
        yield Finding("hibernation", Level.OK, "possible" + (limits if backend().has_context else ""))


def check_settings(machine: Machine) -> Iterator[Finding]:
    from memsaver_core.settings import CoreSettings
    from memsaver_server.settings import Settings

    for subject, model in (("settings of the core", CoreSettings), ("settings of the service", Settings)):
        try:
            model()
        except ValueError as error:
            yield Finding(subject, Level.BLOCKED, _wrong_settings(error), "correct or unset it in the environment")


def _wrong_settings(error: ValueError) -> str:
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return str(error)
    wrong = []
    for one in error.errors():
        name = "_".join(["MEMSAVER", *map(str, one["loc"])]).upper()
        # No secret is shown; the input of an error without a name, which is of several settings, has all of them.
        is_public = one["loc"] and not name.endswith("_KEY")
        wrong.append(f"{name}={one['input']!r}: {one['msg']}" if is_public else f"{name}: {one['msg']}")
    return "; ".join(wrong)


def check_host_driver(machine: Machine) -> Iterator[Finding]:
    from memsaver_core.settings import CoreSettings

    settings = CoreSettings()
    limit = _cgroup_limit_bytes()
    size = int(settings.host_capacity) or _total_memory_bytes() // 2
    names = [name for name in settings.host_device.split(",") if name]
    shared = f"shared by all processes that name {' or '.join(names)}" if names else "private to each process"
    found = f"capacity {size / 2**30:.1f} GiB{'' if settings.host_capacity else ' (half of RAM)'}, {shared}"
    if limit is not None and size > limit:
        found += f", but this container is limited to {limit / 2**30:.1f} GiB"
        yield Finding("host driver", Level.WARNING, found, "set MEMSAVER_HOST_CAPACITY below the container's limit")
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
