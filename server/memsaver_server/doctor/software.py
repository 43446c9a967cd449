"""Checks of Python, torch, settings, the saver, and the host's memory, which holds backups."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from memsaver_server.doctor.finding import Finding, Level, Machine
from memsaver_server.port_holders import port_holders

_MIN_TORCH = (2, 6)
#: The default of memsaver serve.
_PORT = 30000
#: Characters of a key below which it is pointed out: 16 of the 64 that keys are commonly made of are 96 bits.
_SHORT_KEY = 16


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


def check_extras(machine: Machine) -> Iterator[Finding]:
    for extra, packages, level in (
        ("server", ("fastapi", "uvicorn", "prometheus_client"), Level.BLOCKED),
        ("engine", ("transformers", "safetensors"), Level.NOTE),
    ):
        missing = [name for name in packages if not _is_installed(name)]
        if missing:
            found = f"the extra {extra!r} is not installed: {', '.join(missing)} missing"
            what = "no service can run without it" if extra == "server" else "memsaver serve and demo need it"
            remedy = f"pip install 'memsaver[{extra}]', or in a checkout pip install '.[{extra}]'"
            yield Finding("packages", level, f"{found}; {what}", remedy)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # its entry in sys.modules has no specification
        return False


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
    from memsaver_server.settings import Settings, misspelt_variables

    for subject, model in (("settings of the core", CoreSettings), ("settings of the service", Settings)):
        try:
            model()
        except ValueError as error:
            yield Finding(subject, Level.BLOCKED, str(error), "correct or unset it in the environment")
    for name, near in misspelt_variables().items():
        yield Finding("environment", Level.WARNING, f"{name} has no effect: no setting has that name", f"use {near}")


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


def check_backup_folder(machine: Machine) -> Iterator[Finding]:
    from memsaver_core.settings import CoreSettings

    folder = CoreSettings().file_dir
    subject, remedy = "backup folder", "set MEMSAVER_FILE_DIR to a folder on a disk, that can be written"
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        found = f"{folder} cannot be used: {error.strerror}; a release to files would fail"
        yield Finding(subject, Level.BLOCKED if "MEMSAVER_FILE_DIR" in os.environ else Level.WARNING, found, remedy)
        return
    found = f"{folder}, {free / 2**30:.1f} GiB free, for tags whose restore policy is file"
    if _file_system(folder) in ("tmpfs", "ramfs"):
        yield Finding(subject, Level.NOTE, f"{found}; it is in memory, so that files there save none", remedy)
    else:
        yield Finding(subject, Level.OK, found)


def _file_system(folder: str) -> str:
    """Return the type of the file system that holds ``folder``."""
    found = ("", "")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if f"{os.path.realpath(folder)}/".startswith(f"{place.rstrip('/')}/") and len(place) >= len(found[0]):
            found = (place, kind)
    return found[1]


def check_key(machine: Machine) -> Iterator[Finding]:
    from memsaver_server.settings import Settings

    key = Settings().api_key
    if key is None:
        found = "none: only this machine's users can call, through a loopback address or a Unix socket"
        yield Finding("key", Level.NOTE, found, "set MEMSAVER_API_KEY to serve on another address")
    elif len(key.get_secret_value()) < _SHORT_KEY:
        found = f"MEMSAVER_API_KEY has fewer than {_SHORT_KEY} characters, which can be guessed"
        yield Finding("key", Level.WARNING, found, "make one by: openssl rand -hex 32")
    else:
        yield Finding("key", Level.OK, "MEMSAVER_API_KEY is set; every caller needs it")


def check_port(machine: Machine) -> Iterator[Finding]:
    subject, remedy = f"port {_PORT}", "serve on another one: memsaver serve --port N"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", _PORT))
        except OSError as error:
            held = " and ".join(port_holders(_PORT)) or "a process of another user"
            yield Finding(subject, Level.WARNING, f"{error.strerror}: {held} has it", remedy)
        else:
            yield Finding(subject, Level.OK, "free on 127.0.0.1")


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
