"""memsaver_core: give device memory back while the tensors in it keep their addresses.

    import memsaver_core as ms

    with ms.region("weights"):
        model = build_model()
    ms.release()      # the memory is the driver's again
    ms.resume()       # same addresses, same content

With the saver disabled (``MEMSAVER_ENABLED=0``) every call is a no-op and torch behaves as without memsaver.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from memsaver_core.contract.errors import (
    BackupError,
    ConfigurationError,
    ContextLostError,
    DiskFullError,
    DriverError,
    ForkedProcessError,
    MemsaverError,
    NotResidentError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    UnknownTagError,
    UnsupportedError,
)
from memsaver_core.contract.policies import DEFAULT_POLICIES, WELL_KNOWN_TAGS, RestorePolicy
from memsaver_core.contract.reports import DeviceDelta, OperationReport, PhaseReport, ResizeReport, TagReport
from memsaver_core.contract.requests import MemoryRequest
from memsaver_core.contract.status import (
    CommunicatorStatus,
    DeviceMemory,
    HostBackupStatus,
    Progress,
    RankStatus,
    Status,
    TagStatus,
    TorchMemory,
)

if TYPE_CHECKING:
    from memsaver_core import communicators, training
    from memsaver_core.device_memory import graph_memory_bytes, read_communicators, read_devices, read_torch_memory
    from memsaver_core.graphs import GraphPool, graph
    from memsaver_core.hibernation import hibernation_obstacles
    from memsaver_core.manifests import WeightsKey, revision_of
    from memsaver_core.phases import PhaseLog
    from memsaver_core.process import configure, core_settings, driver_name, enabled, torch_device
    from memsaver_core.regions import adopt, region
    from memsaver_core.release_resume import (
        check_tags,
        give_back_reserved,
        prepare_backup,
        release,
        release_with,
        reserve_with,
        resume,
        resume_with,
        status,
    )
    from memsaver_core.resizing import resize
    from memsaver_core.storages import is_plain
    from memsaver_core.weights import load_weights

__all__ = [
    "DEFAULT_POLICIES", "WELL_KNOWN_TAGS", "BackupError", "CommunicatorStatus", "ConfigurationError",
    "ContextLostError", "DeviceDelta", "DeviceMemory", "DiskFullError", "DriverError", "ForkedProcessError",
    "GraphPool", "HostBackupStatus", "MemoryRequest", "MemsaverError", "NotResidentError", "OperationReport",
    "OutOfDeviceMemoryError", "OutOfHostMemoryError", "PhaseLog", "PhaseReport", "Progress", "RankStatus",
    "ResizeReport", "RestorePolicy", "Status", "TagReport", "TagStatus", "TorchMemory", "UnknownTagError",
    "UnsupportedError", "WeightsKey", "adopt", "check_tags", "communicators", "configure", "core_settings",
    "driver_name", "enabled", "give_back_reserved", "graph", "graph_memory_bytes", "hibernation_obstacles", "is_plain",
    "load_weights", "prepare_backup", "read_communicators", "read_devices", "read_torch_memory", "region", "release",
    "release_with", "reserve_with", "resize", "resume", "resume_with", "revision_of", "status", "torch_device",
    "training",
]  # fmt: skip

#: The modules that have the other names. They import torch, so that happens at the first use of such a name.
_LAZY = (
    "phases", "process", "storages", "regions", "graphs", "hibernation", "device_memory", "release_resume", "resizing",
    "manifests", "weights",
)  # fmt: skip

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name in ("communicators", "training"):
            return importlib.import_module(f"{__name__}.{name}")
        if name in __all__:
            for module in _LAZY:
                if value := vars(importlib.import_module(f"{__name__}.{module}")).get(name):
                    globals()[name] = value
                    return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
