"""memsaver_core: give device memory back while the tensors in it keep their addresses.

    import memsaver_core as ms

    with ms.region("weights"):
        model = build_model()
    ms.release()      # the memory is the driver's again
    ms.resume()       # same addresses, same content

With the saver disabled (``MEMSAVER_ENABLED=0``) every call is a no-op and torch behaves as without memsaver.
"""

from memsaver_core.backends.host_storage import is_plain
from memsaver_core.device_memory import read_devices
from memsaver_core.errors import (
    BackupError,
    ConfigurationError,
    ContextLostError,
    DriverError,
    ForkedProcessError,
    MemsaverError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    UnknownTagError,
    UnsupportedError,
)
from memsaver_core.graphs import GraphPool, graph, graph_memory_bytes
from memsaver_core.hibernation import blockers as hibernation_blockers
from memsaver_core.phases import PhaseLog
from memsaver_core.policies import DEFAULT_POLICIES, WELL_KNOWN_TAGS, RestorePolicy
from memsaver_core.process import configure, driver_name, enabled, torch_device
from memsaver_core.process import settings as core_settings
from memsaver_core.regions import adopt, region
from memsaver_core.release_resume import check_tags, prepare_backup, release, resume, status
from memsaver_core.reports import (
    DeviceDelta,
    DeviceMemory,
    HostBackupStatus,
    OperationReport,
    PhaseReport,
    Progress,
    Status,
    TagReport,
    TagStatus,
    TorchMemory,
)
from memsaver_core.torch_memory import read_torch_memory

__all__ = [
    "DEFAULT_POLICIES",
    "WELL_KNOWN_TAGS",
    "BackupError",
    "ConfigurationError",
    "ContextLostError",
    "DeviceDelta",
    "DeviceMemory",
    "DriverError",
    "ForkedProcessError",
    "GraphPool",
    "HostBackupStatus",
    "MemsaverError",
    "OperationReport",
    "OutOfDeviceMemoryError",
    "OutOfHostMemoryError",
    "PhaseLog",
    "PhaseReport",
    "Progress",
    "RestorePolicy",
    "Status",
    "TagReport",
    "TagStatus",
    "TorchMemory",
    "UnknownTagError",
    "UnsupportedError",
    "adopt",
    "check_tags",
    "configure",
    "core_settings",
    "driver_name",
    "enabled",
    "graph",
    "graph_memory_bytes",
    "hibernation_blockers",
    "is_plain",
    "prepare_backup",
    "read_devices",
    "read_torch_memory",
    "region",
    "release",
    "resume",
    "status",
    "torch_device",
]
