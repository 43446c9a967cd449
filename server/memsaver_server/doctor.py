"""What on this machine and in this environment helps or hinders memsaver, each with what to do about it.

Nothing here creates a device context: a check must not cost the memory that it is there to save.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_MIN_TORCH = (2, 6)

_CU_VMM_SUPPORTED = 102
_CU_RDMA_WITH_VMM_SUPPORTED = 110
_CU_MODULE_LAZY_LOADING = 2

#: Both names are read by torch; the second came with torch 2.9.
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Level(str, Enum):
    """How a check went. Only ``BLOCKED`` keeps memsaver from working."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    BLOCKED = "blocked"


@dataclass(frozen=True)
class Finding:
    """One check's outcome.

    Attributes:
        subject: what was looked at.
        level: how it went.
        found: what is there.
        remedy: what to do, empty where nothing is to be done.
    """

    subject: str
    level: Level
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Machine:
    """What the checks share: they look once."""

    cuda: ctypes.CDLL | None
    cuda_error: str
    device_count: int

    @property
    def has_gpu(self) -> bool:
        return self.device_count > 0


def examine() -> tuple[Finding, ...]:
    """Run every check. Takes about as long as importing torch; no check raises."""
    machine = _look()
    checks: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
        _check_python,
        _check_torch,
        _check_settings,
        _check_core,
        _check_cuda_driver,
        _check_devices,
        _check_meter,
        _check_expandable_segments,
        _check_nccl,
        _check_hibernation,
        _check_module_loading,
        _check_host_driver,
        _check_host_memory,
    )
    findings: list[Finding] = []
    for check in checks:
        subject = check.__name__.removeprefix("_check_").replace("_", " ")
        try:
            findings.extend(check(machine))
        except Exception as error:
            if isinstance(error, ValueError) and any(one.level is Level.BLOCKED for one in findings):
                continue  # a setting that cannot be used, and is reported already
            findings.append(Finding(subject, Level.WARNING, f"could not be checked: {type(error).__name__}: {error}"))
    return tuple(findings)


def _look() -> Machine:
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


def _check_python(machine: Machine) -> Iterator[Finding]:
    version = platform.python_version()
    supported = (3, 10) <= sys.version_info[:2] < (3, 14)
    yield Finding(
        "python",
        Level.OK if supported else Level.BLOCKED,
        f"{version}, {platform.system()} {platform.machine()}",
        "" if supported else "use Python 3.10 to 3.13",
    )


def _check_torch(machine: Machine) -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", Level.BLOCKED, f"not importable: {error}", "pip install 'torch>=2.6'")
        return
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if numbers < _MIN_TORCH:
        yield Finding("torch", Level.BLOCKED, torch.__version__, "memsaver needs torch 2.6 or newer")
    elif machine.has_gpu and torch.version.cuda is None:
        yield Finding(
            "torch",
            Level.BLOCKED,
            f"{torch.__version__}, a build without CUDA, on a machine with a GPU",
            "install torch's CUDA build, or set MEMSAVER_DRIVER=host to work without the GPU",
        )
    elif machine.has_gpu and not torch.cuda.is_available():
        yield Finding(
            "torch",
            Level.BLOCKED,
            f"{torch.__version__} for CUDA {torch.version.cuda}, but torch sees no device",
            "the driver is too old for this build, or CUDA_VISIBLE_DEVICES hides the devices",
        )
    else:
        build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
        yield Finding("torch", Level.OK, f"{torch.__version__}, {build}")


def _check_core(machine: Machine) -> Iterator[Finding]:
    try:
        import memsaver_core
    except ImportError as error:
        yield Finding("native module", Level.BLOCKED, f"not importable: {error}", "build it: pip install -e .")
        return
    if not memsaver_core.enabled():
        yield Finding(
            "saver",
            Level.WARNING,
            "disabled: release and resume change nothing",
            "unset MEMSAVER_ENABLED, or set it to 1",
        )
        return
    driver = memsaver_core.driver_name()
    if driver == "cuda":
        yield Finding("saver", Level.OK, "enabled, on the CUDA driver")
    elif driver == "host":
        why = "" if machine.has_gpu else "; there is no GPU here"
        yield Finding("saver", Level.OK, f"enabled, on the host driver{why}")
    else:
        yield Finding(
            "saver", Level.BLOCKED, f"no driver works ({driver})", "see the lines on CUDA and the host driver"
        )


def _check_cuda_driver(machine: Machine) -> Iterator[Finding]:
    if machine.cuda is None:
        yield Finding("CUDA driver", Level.NOTE, "none (libcuda.so.1 is not here): the host driver is used")
        return
    if machine.cuda_error:
        yield Finding(
            "CUDA driver",
            Level.BLOCKED if Path("/dev/nvidiactl").exists() else Level.NOTE,
            machine.cuda_error,
            "check nvidia-smi; in a container, that it was started with the GPU",
        )
        return
    number = ctypes.c_int()
    machine.cuda.cuDriverGetVersion(ctypes.byref(number))
    release = _driver_release()
    cuda = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    fine = number.value >= 11040
    yield Finding(
        "CUDA driver",
        Level.OK if fine else Level.BLOCKED,
        f"{release}, {cuda}" if release else cuda,
        "" if fine else "update the driver: memsaver needs CUDA 11.4 or newer",
    )


def _driver_release() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        return ""


def _check_devices(machine: Machine) -> Iterator[Finding]:
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
        found += "yes" if vmm else "no"
        found += ", GPUDirect RDMA on it " + ("yes" if rdma else "no")
        remedy = "" if vmm else "this device (or its vGPU profile) cannot unmap memory: hide it by CUDA_VISIBLE_DEVICES"
        yield Finding(f"device {index}", Level.OK if vmm else Level.BLOCKED, found, remedy)


def _attribute(cuda: ctypes.CDLL, device: ctypes.c_int, number: int) -> bool:
    value = ctypes.c_int()
    return cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0 and value.value == 1


def _check_meter(machine: Machine) -> Iterator[Finding]:
    if not machine.has_gpu:
        return
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:
        yield Finding(
            "NVML",
            Level.WARNING,
            f"does not work: {error}",
            "reports then show what the CUDA driver counts; in a container, ask for the 'utility' driver capability",
        )
        return
    yield Finding("NVML", Level.OK, f"device 0 has {used / 2**20:,.0f} MiB in use")


def _check_expandable_segments(machine: Machine) -> Iterator[Finding]:
    on = [name for name in _ALLOCATOR_VARIABLES if _turns_expandable_segments_on(os.environ.get(name, ""))]
    if not on:
        yield Finding("expandable segments", Level.OK, f"off ({' and '.join(_ALLOCATOR_VARIABLES)})")
        return
    yield Finding(
        "expandable segments",
        Level.WARNING,
        f"on by {' and '.join(on)}: regions are honoured by torch 2.11, but older versions place tensors past them",
        f"remove expandable_segments:True from {' and '.join(on)}",
    )


def _turns_expandable_segments_on(value: str) -> bool:
    settings = (part.partition(":") for part in value.split(","))
    return any(
        key.strip() == "expandable_segments" and setting.strip().lower() == "true" for key, _, setting in settings
    )


def _check_nccl(machine: Machine) -> Iterator[Finding]:
    value = os.environ.get("NCCL_GRAPH_REGISTER")
    if value == "0":
        yield Finding("NCCL graph registration", Level.OK, "off (NCCL_GRAPH_REGISTER=0)")
    elif machine.device_count > 1:
        yield Finding(
            "NCCL graph registration",
            Level.WARNING,
            f"NCCL_GRAPH_REGISTER is {value or 'unset, which means on'}: graphs that use NCCL hang on replay after "
            "their memory was mapped anew",
            "set NCCL_GRAPH_REGISTER=0 before the engine starts",
        )
    else:
        yield Finding(
            "NCCL graph registration", Level.NOTE, "not set; matters only to engines that capture NCCL in CUDA graphs"
        )


def _check_hibernation(machine: Machine) -> Iterator[Finding]:
    import memsaver_core

    reasons = memsaver_core.hibernation_obstacles()
    if reasons:
        yield Finding("hibernation", Level.NOTE, "not possible: " + "; ".join(reasons))
    elif memsaver_core.driver_name() == "cuda":
        found = "possible, unless the engine uses NCCL, CUDA IPC, managed memory or devices that reach each other"
        yield Finding("hibernation", Level.OK, found)
    else:
        yield Finding("hibernation", Level.OK, "possible")


def _check_module_loading(machine: Machine) -> Iterator[Finding]:
    """Modules that nobody uses cannot be unloaded from outside: they are best not loaded."""
    mode = ctypes.c_int()
    if not machine.has_gpu or machine.cuda is None or not hasattr(machine.cuda, "cuModuleGetLoadingMode"):
        return
    if machine.cuda.cuModuleGetLoadingMode(ctypes.byref(mode)) != 0:
        return
    if mode.value == _CU_MODULE_LAZY_LOADING:
        yield Finding("CUDA modules", Level.OK, "loaded as they are used")
    else:
        yield Finding(
            "CUDA modules",
            Level.WARNING,
            "all of every library's are loaded at its first use: some hundred MiB that no release gives back",
            "unset CUDA_MODULE_LOADING, or set it to LAZY; a release that hibernates gives them back, too",
        )


def _check_settings(machine: Machine) -> Iterator[Finding]:
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
    wrong = (
        f"MEMSAVER_{'_'.join(map(str, one['loc'])).upper()}={one['input']!r}: {one['msg']}" for one in error.errors()
    )
    return "; ".join(wrong)


def _check_host_driver(machine: Machine) -> Iterator[Finding]:
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
            f"{found}, but this container may use only {limit / 2**30:.1f} GiB",
            "set MEMSAVER_HOST_CAPACITY below the container's limit",
        )
    else:
        yield Finding("host driver", Level.OK, found)


def _check_host_memory(machine: Machine) -> Iterator[Finding]:
    available = _meminfo_bytes("MemAvailable")
    limit = _cgroup_limit_bytes()
    found = f"{available / 2**30:.1f} GiB available of {_total_memory_bytes() / 2**30:.1f} GiB"
    if limit is not None:
        found += f", container limit {limit / 2**30:.1f} GiB"
    yield Finding(
        "host memory",
        Level.OK,
        f"{found}; backups of tags that keep their content go there",
    )


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
