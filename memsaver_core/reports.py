"""Results of operations: frozen, plain data. All sizes are bytes, all times seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device at one moment.

    Attributes:
        index: torch's index of the device in this process (or the number of the host device).
        uuid: the driver's identifier, independent of CUDA_VISIBLE_DEVICES.
        name: name of the product.
        total_bytes: memory of the device.
        used_bytes: memory in use by all processes, as nvidia-smi shows it.
        process_bytes: memory in use by this process, or None if the driver does not say.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    process_bytes: int | None


@dataclass(frozen=True)
class TorchMemory:
    """What torch's allocator holds of one device.

    Attributes:
        reserved_bytes: all segments; those of regions count whether mapped or released.
        cached_bytes: free memory in segments outside of regions; None if counting it would take too long.
    """

    reserved_bytes: int
    cached_bytes: int | None


@dataclass(frozen=True)
class DeviceDelta:
    """Memory of one device before and after a phase or operation. ``delta_bytes`` is after minus before."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_before_bytes: int
    used_after_bytes: int
    process_bytes: int | None

    @property
    def delta_bytes(self) -> int:
        return self.used_after_bytes - self.used_before_bytes


@dataclass(frozen=True)
class PhaseReport:
    """One step of an operation.

    Attributes:
        name: drain, synchronize, pause, trim_workspaces, empty_cache, trim_graphs, trim_pinned, ipc_collect, settle,
            hibernate; wake, wait_for_weights, wait_for_memory, restore, repair, reopen.
        seconds: how long it took.
        devices: device memory before and after it.
        details: figures of the phase: seconds per kind of work (which overlap), bytes, GB/s.
    """

    name: str
    seconds: float
    devices: tuple[DeviceDelta, ...]
    details: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TagReport:
    """What an operation did to one tag.

    Attributes:
        tag: its name.
        restore: its policy; ``mixed`` if its regions differ.
        state: ``resident`` or ``released`` after the operation.
        bytes: live bytes under the tag, on all devices.
        released_bytes: bytes that this release gave back to the driver (0 in a resume).
        resumed_bytes: bytes that this resume mapped (0 in a release).
        backed_up_bytes: bytes of content copied to host memory or disk by this release.
        unchanged_bytes: bytes of content not copied, because the backup is still equal.
        zero_bytes: bytes of content in all-zero blocks, which need no backup memory.
        restored_bytes: bytes of content copied back by this resume.
        already: the tag was in the requested state when the operation began.
    """

    tag: str
    restore: str
    state: str
    bytes: int = 0
    released_bytes: int = 0
    resumed_bytes: int = 0
    backed_up_bytes: int = 0
    unchanged_bytes: int = 0
    zero_bytes: int = 0
    restored_bytes: int = 0
    already: bool = False


@dataclass(frozen=True)
class OperationReport:
    """What a release or a resume did, measured.

    Attributes:
        operation: ``release`` or ``resume``.
        enabled: False if memsaver is disabled and the call was a no-op.
        seconds: duration of the whole call.
        tags: one report for each requested tag (all tags if none was named).
        phases: its steps, in the order in which they ran.
        devices: device memory before and after the whole call.
    """

    operation: str
    enabled: bool
    seconds: float
    tags: tuple[TagReport, ...]
    phases: tuple[PhaseReport, ...]
    devices: tuple[DeviceDelta, ...]

    @property
    def released_bytes(self) -> int:
        return sum(tag.released_bytes for tag in self.tags)

    @property
    def resumed_bytes(self) -> int:
        return sum(tag.resumed_bytes for tag in self.tags)


@dataclass(frozen=True)
class TagStatus:
    """What a tag holds now.

    Attributes:
        tag: its name.
        restore: its policy; ``mixed`` if its regions differ.
        state: ``resident``, ``releasing``, ``released`` or ``resuming``.
        bytes: live bytes, on all devices, mapped or not.
        resident_bytes: live bytes that are mapped.
        released_bytes: live bytes that are released.
        retained_bytes: mapped bytes that no live allocation uses (free ranges in shared chunks).
        backed_up_bytes: live content with a backup in host memory or on disk.
        allocations: number of live allocations (torch's segments).
        chunks: number of physical handles.
        mapped_by_device: mapped bytes, retained ones included, by device index.
        bytes_by_device: live bytes, mapped or not, by device index.
    """

    tag: str
    restore: str
    state: str
    bytes: int
    resident_bytes: int
    released_bytes: int
    retained_bytes: int
    backed_up_bytes: int
    allocations: int
    chunks: int
    mapped_by_device: Mapping[int, int] = field(default_factory=dict)
    bytes_by_device: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class HostBackupStatus:
    """Host memory and files that hold backups.

    Attributes:
        bytes: content held now, in memory and in files.
        capacity_bytes: pinned memory that the pool has ready.
        target_bytes: capacity after the growth under way; ``capacity_bytes`` if there is none.
        limit_bytes: the bound on that memory.
        file_bytes: content held in files.
        prepared: whether the pool is as large as a release of everything needs.
    """

    bytes: int
    capacity_bytes: int
    limit_bytes: int
    file_bytes: int = 0
    prepared: bool = True
    target_bytes: int = 0


@dataclass(frozen=True)
class Progress:
    """Progress of the operation in flight.

    Attributes:
        operation: ``release``, ``resume``, or ``""`` if none is in flight.
        done_bytes: bytes of content processed so far (copied, or found unchanged).
        total_bytes: bytes of content to process.
        copied_bytes: bytes copied over the link so far.
        seconds: since the operation began.
    """

    operation: str
    done_bytes: int
    total_bytes: int
    copied_bytes: int
    seconds: float


@dataclass(frozen=True)
class Status:
    """What the saver of this process holds. Reading it never waits for an operation in flight and calls no driver.

    Attributes:
        enabled: False if memsaver is disabled.
        driver: ``cuda``, ``host`` or ``none``.
        state: ``resident``, ``releasing``, ``released``, ``resuming`` or ``failed``.
        failure: why the state is ``failed``, else an empty string.
        hibernated: the CUDA context is given back, too; CUDA calls of this process block until the resume.
    """

    enabled: bool
    driver: str
    state: str
    failure: str
    tags: tuple[TagStatus, ...]
    host_backup: HostBackupStatus
    progress: Progress
    hibernated: bool = False
