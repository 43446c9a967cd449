"""Checks of Python, torch, settings and the saver."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

from memsaver_server.doctor.finding import Finding, Level, Machine

_MIN_TORCH = (2, 6)


def check_python(machine: Machine) -> Iterator[Finding]:
    version = platform.python_version()
    supported = (3, 10) <= sys.version_info[:2] < (3, 15)
    yield Finding(
        "python",
        Level.OK if supported else Level.BLOCKED,
        f"{version}, {platform.system()} {platform.machine()}",
        "" if supported else "use Python 3.10 to 3.14",
    )


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
        yield Finding(
            "torch",
            Level.BLOCKED,
            f"{torch.__version__}, a build without CUDA, on a machine with a GPU",
            "install torch's CUDA build, or set MEMSAVER_DRIVER=host to run without the GPU",
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


def check_core(machine: Machine) -> Iterator[Finding]:
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
    wrong = (
        f"MEMSAVER_{'_'.join(map(str, one['loc'])).upper()}={one['input']!r}: {one['msg']}" for one in error.errors()
    )
    return "; ".join(wrong)
