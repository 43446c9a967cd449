"""Checks what on this machine and in this environment helps or hinders memsaver, and what to do about it.

No check creates a device context, which would take device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from memsaver_server.doctor import cuda, software
from memsaver_server.doctor.finding import Finding, Level, Machine, look
from memsaver_server.missing_package import missing_package

__all__ = ["Finding", "Level", "examine"]

_CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    software.check_python,
    software.check_torch,
    software.check_extras,
    software.check_settings,
    software.check_core,
    cuda.check_cuda_driver,
    cuda.check_devices,
    cuda.check_nvml,
    cuda.check_expandable_segments,
    cuda.check_nccl,
    software.check_hibernation,
    cuda.check_module_loading,
    software.check_host_driver,
    software.check_host_memory,
    software.check_backup_folder,
    software.check_key,
    software.check_port,
)


def examine() -> tuple[Finding, ...]:
    """Run every check. Takes about as long as importing torch; raises nothing."""
    machine = look()
    findings: list[Finding] = []
    for check in _CHECKS:
        subject = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            findings.extend(check(machine))
        except ModuleNotFoundError as error:
            findings.append(Finding(subject, Level.BLOCKED, "could not be checked", missing_package(error, "server")))
        except Exception as error:
            if isinstance(error, ValueError) and any(one.level is Level.BLOCKED for one in findings):
                continue  # an invalid setting, which is reported already
            findings.append(Finding(subject, Level.WARNING, f"could not be checked: {type(error).__name__}: {error}"))
    return tuple(findings)
