"""Checks what on this machine and in this environment helps or hinders memsaver, and what to do about it.

No check creates a device context, which would take device memory.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memsaver_server.address import DEFAULT_PORT
from memsaver_server.missing_package import missing_package
from memsaver_server.port_holders import port_holders

_MIN_TORCH = "2.11"
#: If none of these is installed, the client alone is.
_SERVING = ("torch", "fastapi", "uvicorn", "prometheus_client")
#: Characters of a key below which it is pointed out: 16 of the 64 that keys are commonly made of are 96 bits.
_SHORT_KEY = 16
#: What the account of a shared host device takes in /dev/shm.
_ACCOUNT_BYTES = 16 << 10
_CU_INTEGRATED = 18
_CU_VMM_SUPPORTED = 102
_CU_RDMA_WITH_VMM_SUPPORTED = 110
_CU_MODULE_LAZY_LOADING = 2


@dataclass(frozen=True)
class _EnginePlugin:
    """How an engine finds memsaver's plugin, which ``variable`` turns on. The engine ``package`` loads the entry points
    of ``group`` if it has the folder ``loader``; all of them, only those that the environment's ``chosen`` lists, or
    those that ``left_out`` does not list."""

    variable: str
    package: str
    loader: str
    group: str
    chosen: str = ""
    left_out: str = ""

    def missing(self) -> tuple[str, str] | None:
        """Return why the plugin is not loaded, and what to do; None if it is, or the engine is not in this environment.
        Does not import the engine."""
        spec = find_spec(self.package)
        if spec is None:
            return None
        folders = spec.submodule_search_locations or ()
        if not any(Path(folder, self.loader).exists() for folder in folders):
            remedy = f"install a version of {self.package} that memsaver's documentation lists"
            return f"{', '.join(folders)} has no {self.loader}, so this version loads no plugins", remedy
        if "memsaver" not in [each.name for each in entry_points(group=self.group)]:
            return "memsaver is not installed here, so it is not found", "pip install 'memsaver[server]'"
        if (chosen := _names(self.chosen)) and "memsaver" not in chosen:
            return f"{self.chosen} lists others alone", f"add memsaver to {self.chosen}, or unset it"
        if "memsaver" in _names(self.left_out):
            return f"{self.left_out} leaves it out", f"take memsaver out of {self.left_out}"
        return None


def _names(variable: str) -> set[str]:
    return {name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()}


_PLUGINS = (
    _EnginePlugin(
        variable="MEMSAVER_SGLANG",
        package="sglang",
        loader="srt/plugins",
        group="sglang.srt.plugins",
        chosen="SGLANG_PLUGINS",
    ),
    _EnginePlugin(
        variable="MEMSAVER_TOKENSPEED",
        package="tokenspeed",
        loader="runtime/plugins",
        group="tokenspeed.plugins",
        left_out="TOKENSPEED_DISABLE_PLUGINS",
    ),
)


class Level(str, Enum):
    """The result of a check. Only ``BLOCKED`` prevents memsaver from working."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Finding:
    """The outcome of one check. ``remedy`` says what to do, if anything."""

    subject: str
    level: Level
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Machine:
    """The CUDA driver as all checks see it: its library if there is one, why it does not work, its devices."""

    cuda: ctypes.CDLL | None
    cuda_error: str
    device_count: int

    @property
    def has_gpu(self) -> bool:
        return self.device_count > 0


def look() -> Machine:
    """Load the CUDA driver, without creating a context."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return Machine(None, str(error), 0)
    code = cuda.cuInit(0)
    if code != 0:
        return Machine(cuda, f"cuInit failed with error {code}", 0)
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return Machine(cuda, "", count.value)


def examine() -> tuple[Finding, ...]:
    """Run every check. Takes about as long as importing torch; raises nothing."""
    machine = look()
    findings: list[Finding] = []
    client_alone = not any(map(_is_installed, _SERVING))
    for check in (check_python, check_client) if client_alone else _CHECKS:
        subject = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            found = check(machine)
            findings.extend([found] if isinstance(found, Finding) else found or ())
        except ModuleNotFoundError as error:
            findings.append(Finding(subject, Level.BLOCKED, "could not be checked", missing_package(error, "server")))
        except Exception as error:
            if isinstance(error, ValueError) and any(one.level is Level.BLOCKED for one in findings):
                continue  # an invalid setting, which is reported already
            findings.append(Finding(subject, Level.WARNING, f"could not be checked: {type(error).__name__}: {error}"))
    return tuple(findings)


def check_python(machine: Machine) -> Finding:
    found = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if (3, 10) <= sys.version_info[:2] < (3, 15):
        return Finding("python", Level.OK, found)
    return Finding("python", Level.BLOCKED, found, "use Python 3.10 to 3.14")


def check_torch(machine: Machine) -> Finding:
    try:
        import torch
    except ImportError as error:
        return Finding("torch", Level.BLOCKED, f"not importable: {error}", f"pip install 'torch>={_MIN_TORCH}'")
    numbers, oldest = ([int(part) for part in each.split(".")[:2]] for each in (torch.__version__, _MIN_TORCH))
    if numbers < oldest:
        return Finding("torch", Level.BLOCKED, torch.__version__, f"memsaver needs torch {_MIN_TORCH} or newer")
    if machine.has_gpu and torch.version.cuda is None:
        found = f"{torch.__version__}, a build without CUDA, on a machine with a GPU"
        remedy = "install torch's CUDA build, or set MEMSAVER_DRIVER=host to run without the GPU"
        return Finding("torch", Level.BLOCKED, found, remedy)
    if machine.has_gpu and not torch.cuda.is_available():
        found = f"{torch.__version__} for CUDA {torch.version.cuda}, but torch sees no device"
        remedy = "the driver is too old for this build, or CUDA_VISIBLE_DEVICES hides the devices"
        return Finding("torch", Level.BLOCKED, found, remedy)
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Finding("torch", Level.OK, f"{torch.__version__}, {build}")


def check_client(machine: Machine) -> Finding:
    found = "the client and the command line alone: they call services that run elsewhere"
    remedy = "to serve here: pip install 'memsaver[server]', or in a checkout pip install '.[server]'"
    return Finding("packages", Level.NOTE, found, remedy)


def check_extras(machine: Machine) -> Iterator[Finding]:
    for extra, packages, level, what in (
        ("server", _SERVING[1:], Level.BLOCKED, "no service can run without it"),
        ("engine", ("transformers", "safetensors"), Level.NOTE, "memsaver serve and demo need it"),
    ):
        missing = [name for name in packages if not _is_installed(name)]
        if missing:
            found = f"the extra {extra!r} is not installed: {', '.join(missing)} missing"
            remedy = f"pip install 'memsaver[{extra}]', or in a checkout pip install '.[{extra}]'"
            yield Finding("packages", level, f"{found}; {what}", remedy)


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # its entry in sys.modules has no specification
        return False


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


def check_core(machine: Machine) -> Finding:
    try:
        import memsaver_core
    except ImportError as error:
        return Finding("native module", Level.BLOCKED, f"not importable: {error}", "build it: pip install -e .")
    if not memsaver_core.enabled():
        remedy = "unset MEMSAVER_ENABLED, or set it to 1"
        return Finding("saver", Level.WARNING, "disabled: release and resume change nothing", remedy)
    from memsaver_core.process import backend

    if backend().name == "none":
        return Finding("saver", Level.BLOCKED, "no driver works", "see the findings on CUDA and the host driver")
    if backend().has_context and not machine.has_gpu:
        found = f"MEMSAVER_DRIVER is cuda, but no NVIDIA GPU is found: {machine.cuda_error}"
        remedy = (
            "install NVIDIA's driver (start a container with the GPU), or set MEMSAVER_DRIVER=host to run without one"
        )
        return Finding("saver", Level.BLOCKED, found, remedy)
    if backend().has_context:
        return Finding("saver", Level.OK, "enabled, on the CUDA driver")
    why = "" if machine.has_gpu else "; there is no GPU here"
    return Finding("saver", Level.OK, f"enabled, on the host driver{why}")


def check_cuda_driver(machine: Machine) -> Finding:
    if machine.cuda is None:
        return Finding("CUDA driver", Level.NOTE, "none (libcuda.so.1 not found)")
    if machine.cuda_error:
        level = Level.BLOCKED if Path("/dev/nvidiactl").exists() else Level.NOTE
        remedy = "check nvidia-smi; in a container, that it was started with the GPU"
        return Finding("CUDA driver", level, machine.cuda_error, remedy)
    number = ctypes.c_int()
    machine.cuda.cuDriverGetVersion(ctypes.byref(number))
    found = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    with suppress(Exception):  # NVML is not needed
        found = f"{_nvml().nvmlSystemGetDriverVersion()}, {found}"
    if number.value >= 11040:
        return Finding("CUDA driver", Level.OK, found)
    return Finding("CUDA driver", Level.BLOCKED, found, "update the driver: memsaver needs CUDA 11.4 or newer")


def _nvml() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def check_devices(machine: Machine) -> Iterator[Finding]:
    if machine.cuda is None or not machine.has_gpu:
        return
    for index in range(machine.device_count):
        device = ctypes.c_int()
        machine.cuda.cuDeviceGet(ctypes.byref(device), index)
        name = ctypes.create_string_buffer(128)
        machine.cuda.cuDeviceGetName(name, len(name), device)
        total = ctypes.c_size_t()
        machine.cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        vmm = _attribute(machine.cuda, device, _CU_VMM_SUPPORTED)
        rdma = _attribute(machine.cuda, device, _CU_RDMA_WITH_VMM_SUPPORTED)
        found = f"{name.value.decode()}, {total.value / 2**30:.1f} GiB, virtual memory management "
        found += f"{'yes' if vmm else 'no'}, GPUDirect RDMA on it {'yes' if rdma else 'no'}"
        remedy = "" if vmm else "this device (or its vGPU profile) cannot unmap memory: hide it by CUDA_VISIBLE_DEVICES"
        yield Finding(f"device {index}", Level.OK if vmm else Level.BLOCKED, found, remedy)
        if _attribute(machine.cuda, device, _CU_INTEGRATED):
            remedy = "a backup in host memory would free nothing, so what is kept there stays: use file or discard"
            yield Finding(f"memory of device {index}", Level.WARNING, "is the host's", remedy)


def _attribute(cuda: ctypes.CDLL, device: ctypes.c_int, number: int) -> bool:
    value = ctypes.c_int()
    return cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0 and value.value == 1


def check_nvml(machine: Machine) -> Finding | None:
    if not machine.has_gpu:
        return None
    try:
        nvml = _nvml()
        used = int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0)).used)
    except Exception as error:
        remedy = "reports then use the CUDA driver's count; in a container, request the 'utility' driver capability"
        return Finding("NVML", Level.WARNING, f"does not work: {error}", remedy)
    return Finding("NVML", Level.OK, f"device 0 has {used / 2**20:,.0f} MiB in use")


def check_torch_memory_saver(machine: Machine) -> Finding | None:
    subject = "torch_memory_saver"
    for plugin in _PLUGINS:
        if os.environ.get(plugin.variable, "") in ("", "0"):
            continue
        if reason := plugin.missing():
            found = f"{plugin.variable} is set, but the engine does not load memsaver's plugin: {reason[0]}"
            return Finding(subject, Level.WARNING, found, reason[1])
        return Finding(subject, Level.OK, f"memsaver's in the engine, as {plugin.variable} is set")
    spec = find_spec(subject)
    if spec is None or spec.origin is None:
        return None
    if "memsaver_core" in Path(spec.origin).read_text():  # ours, or the distribution that forwards to it
        return Finding(subject, Level.OK, f"memsaver's, by {spec.origin}")
    remedy = "set MEMSAVER_SGLANG=1 or MEMSAVER_TOKENSPEED=1, or call memsaver_core.compat.install() before its import"
    return Finding(subject, Level.NOTE, f"another one than memsaver's, in {Path(spec.origin).parent}", remedy)


def check_nccl(machine: Machine) -> Finding:
    subject = "NCCL graph registration"
    value = os.environ.get("NCCL_GRAPH_REGISTER")
    if value == "0":
        return Finding(subject, Level.OK, "off (NCCL_GRAPH_REGISTER=0)")
    if machine.device_count > 1:
        found = f"NCCL_GRAPH_REGISTER is {value or 'unset, which means on'}: graphs that use NCCL hang on replay after "
        found += "their memory was remapped"
        return Finding(subject, Level.WARNING, found, "set NCCL_GRAPH_REGISTER=0 before the engine starts")
    return Finding(subject, Level.NOTE, "not set; relevant only if an engine captures NCCL in CUDA graphs")


def check_hibernation(machine: Machine) -> Finding:
    from memsaver_core import hibernation_obstacles
    from memsaver_core.process import backend

    if obstacles := hibernation_obstacles():
        return Finding("hibernation", Level.NOTE, "not possible: " + "; ".join(obstacles))
    limits = ", unless the engine uses NCCL, CUDA IPC, managed memory or peer access"
    return Finding("hibernation", Level.OK, "possible" + (limits if backend().has_context else ""))


def check_module_loading(machine: Machine) -> Finding | None:
    """Modules can be unloaded only by the library that loaded them, so the best is not to load unused ones."""
    mode = ctypes.c_int()
    if not machine.has_gpu or machine.cuda is None or not hasattr(machine.cuda, "cuModuleGetLoadingMode"):
        return None
    if machine.cuda.cuModuleGetLoadingMode(ctypes.byref(mode)) != 0:
        return None
    if mode.value == _CU_MODULE_LAZY_LOADING:
        return Finding("CUDA modules", Level.OK, "loaded at first use")
    found = "all modules of a library are loaded at its first use: some hundred MiB that a release does not free"
    remedy = "unset CUDA_MODULE_LOADING, or set it to LAZY; a release that hibernates frees them as well"
    return Finding("CUDA modules", Level.WARNING, found, remedy)


def check_host_driver(machine: Machine) -> Finding:
    from memsaver_core.release_resume import total_host_bytes
    from memsaver_core.settings import CoreSettings

    settings, most = CoreSettings(), total_host_bytes()
    size = int(settings.host_capacity) or most // 2
    names = [name for name in settings.host_device.split(",") if name]
    shared = f"shared by all processes that name {' or '.join(names)}" if names else "private to each process"
    found = f"capacity {size / 2**30:.1f} GiB{'' if settings.host_capacity else ' (half of RAM)'}, {shared}"
    if names and shutil.disk_usage("/dev/shm").free < _ACCOUNT_BYTES:
        found += "; /dev/shm, which has the account that they share, is full"
        return Finding("host driver", Level.BLOCKED, found, "free space there, or unset MEMSAVER_HOST_DEVICE")
    if size > most:
        found += f", but this machine or container has {most / 2**30:.1f} GiB"
        return Finding("host driver", Level.WARNING, found, "set MEMSAVER_HOST_CAPACITY below that")
    return Finding("host driver", Level.OK, found)


def check_host_memory(machine: Machine) -> Finding:
    from memsaver_core.release_resume import available_host_bytes, total_host_bytes

    found = f"{available_host_bytes() / 2**30:.1f} GiB available of {total_host_bytes() / 2**30:.1f} GiB"
    return Finding("host memory", Level.OK, f"{found}; it holds the backups of tags that keep their content")


def check_backup_folder(machine: Machine) -> Finding:
    from memsaver_core.disk import is_in_memory
    from memsaver_core.settings import CoreSettings

    folder = CoreSettings().file_dir
    subject, remedy = "backup folder", "set MEMSAVER_FILE_DIR to a folder on a disk, that can be written"
    try:
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        found = f"{folder} cannot be used: {error.strerror}; a release to files would fail"
        return Finding(subject, Level.BLOCKED if "MEMSAVER_FILE_DIR" in os.environ else Level.WARNING, found, remedy)
    found = f"{folder}, {free / 2**30:.1f} GiB free, for tags whose restore policy is file"
    if is_in_memory(folder):
        return Finding(subject, Level.NOTE, f"{found}; it is in memory, so that files there save none", remedy)
    return Finding(subject, Level.OK, found)


def check_key(machine: Machine) -> Finding:
    from memsaver_server.settings import Settings

    key = Settings().api_key
    if key is None:
        found = "none: only this machine's users can call, through a loopback address or a Unix socket"
        return Finding("key", Level.NOTE, found, "set MEMSAVER_API_KEY to serve on another address")
    if len(key.get_secret_value()) < _SHORT_KEY:
        found = f"MEMSAVER_API_KEY has fewer than {_SHORT_KEY} characters, which can be guessed"
        return Finding("key", Level.WARNING, found, "make one by: openssl rand -hex 32")
    return Finding("key", Level.OK, "MEMSAVER_API_KEY is set; every caller needs it")


def check_port(machine: Machine) -> Finding:
    subject, remedy = f"port {DEFAULT_PORT}", "serve on another one: memsaver serve --port N"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError as error:
            held = " and ".join(port_holders(DEFAULT_PORT)) or "a process of another user"
            return Finding(subject, Level.WARNING, f"{error.strerror}: {held} has it", remedy)
        return Finding(subject, Level.OK, "free on 127.0.0.1")


#: In the order in which they are written.
_CHECKS = [each for name, each in globals().items() if name.startswith("check_") and each is not check_client]
