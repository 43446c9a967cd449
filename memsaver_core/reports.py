"""Results of operations: frozen, plain data. All sizes are bytes, all times seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device at one moment."""

    index: int  # torch's index of the device in this process (or the number of the host device)
    uuid: str  # the driver's identifier, independent of CUDA_VISIBLE_DEVICES
    name: str  # name of the product
    total_bytes: int  # memory of the device
    used_bytes: int  # memory in use by all processes, as nvidia-smi shows it
    process_bytes: int | None  # memory in use by this process, or None if the driver does not say


@dataclass(frozen=True)
class TorchMemory:
    """What torch's allocator holds of one device."""

    reserved_bytes: int  # all segments; those of regions count whether mapped or released
    cached_bytes: int | None  # free memory in segments outside of regions; None if counting it would take too long


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
    """One step of an operation."""

    # drain, synchronize, pause, trim_workspaces, empty_cache, trim_graphs, trim_pinned, ipc_collect, settle, hibernate;
    # wake, wait_for_weights, wait_for_memory, restore, repair, reopen
    name: str
    seconds: float  # how long it took
    devices: tuple[DeviceDelta, ...]  # device memory before and after it
    details: Mapping[str, float] = field(default_factory=dict)  # seconds per kind of work (overlapping), bytes, GB/s


@dataclass(frozen=True)
class TagReport:
    """What an operation did to one tag."""

    tag: str  # its name
    restore: str  # the policy that it was released under, else its own; ``mixed`` if its regions differ
    state: str  # ``resident`` or ``released`` after the operation
    bytes: int = 0  # live bytes under the tag, on all devices
    released_bytes: int = 0  # bytes that this release gave back to the driver (0 in a resume)
    resumed_bytes: int = 0  # bytes that this resume mapped (0 in a release)
    backed_up_bytes: int = 0  # bytes of content copied to host memory or disk by this release
    unchanged_bytes: int = 0  # bytes of content not copied, because the backup is still equal
    shared_bytes: int = 0  # bytes of content not copied, because the shared store has it from another process
    zero_bytes: int = 0  # bytes of content in all-zero blocks, which need no backup memory
    restored_bytes: int = 0  # bytes of content copied back by this resume
    kept_bytes: int = 0  # what the backups of ``backed_up_bytes`` take: less if they are packed
    already: bool = False  # the tag was in the requested state when the operation began


@dataclass(frozen=True)
class OperationReport:
    """What a release or a resume did, measured."""

    operation: str  # ``release`` or ``resume``
    enabled: bool  # False if memsaver is disabled and the call was a no-op
    seconds: float  # duration of the whole call
    tags: tuple[TagReport, ...]  # one report for each requested tag (all tags if none was named)
    phases: tuple[PhaseReport, ...]  # its steps, in the order in which they ran
    devices: tuple[DeviceDelta, ...]  # device memory before and after the whole call

    @property
    def released_bytes(self) -> int:
        return sum(tag.released_bytes for tag in self.tags)

    @property
    def resumed_bytes(self) -> int:
        return sum(tag.resumed_bytes for tag in self.tags)


@dataclass(frozen=True)
class TagStatus:
    """What a tag holds now."""

    tag: str  # its name
    restore: str  # its policy; ``mixed`` if its regions differ
    state: str  # ``resident``, ``releasing``, ``released`` or ``resuming``
    bytes: int  # live bytes, on all devices, mapped or not
    resident_bytes: int  # live bytes that are mapped
    released_bytes: int  # live bytes that are released
    retained_bytes: int  # mapped bytes that no live allocation uses (free ranges in shared chunks)
    backed_up_bytes: int  # live content with a backup in host memory or on disk
    allocations: int  # number of live allocations (torch's segments)
    chunks: int  # number of physical handles
    mapped_by_device: Mapping[int, int] = field(default_factory=dict)  # mapped bytes, retained too, by device index
    bytes_by_device: Mapping[int, int] = field(default_factory=dict)  # live bytes, mapped or not, by device index
    kept_bytes: int = 0  # what the backups of ``backed_up_bytes`` take: less if they are packed, nothing for zeros
    expected_bytes: int = 0  # host memory that a backup of what is resident is expected to take besides; 0 while busy


@dataclass(frozen=True)
class CommunicatorStatus:
    """One communicator of this process: what lets its ranks exchange device memory."""

    name: str  # the same on all of its ranks, and of no other communicator that a rank of the engine has
    ranks: int  # how many ranks it has
    rank: int  # this process's number among them
    suspendable_bytes: int = 0  # device memory that suspending it gives back; 0 while suspended
    suspended_bytes: int = 0  # device memory that it gave back and takes again; 0 unless suspended
    persistent_bytes: int = 0  # device memory that stays
    suspended: bool = False
    obstacle: str = ""  # why it cannot be suspended and what to do, or an empty string


@dataclass(frozen=True)
class RankStatus:
    """One process of an engine that has several."""

    rank: int  # its number
    pid: int | None  # None if it does not use memsaver
    alive: bool | None  # None if it cannot be watched from here: it is in another container or on another host
    state: str  # as ``Status.state``, as of the last operation


@dataclass(frozen=True)
class SharedStoreStatus:
    """The store of host memory that this process and others use (``MEMSAVER_SHARED_BACKUPS``)."""

    name: str
    processes: int  # that take part in it
    held_bytes: int  # of blocks that this process uses
    share_bytes: int  # the same, each block divided by the number of processes that use it
    used_bytes: int  # of blocks that any process uses
    total_bytes: int  # its memory
    limit_bytes: int  # the bound on its memory, for all processes together


@dataclass(frozen=True)
class HostBackupStatus:
    """Host memory and files that hold backups."""

    bytes: int  # what backups take now, in memory and in files; less than their content if it is packed
    capacity_bytes: int  # pinned memory that the pool has ready
    limit_bytes: int  # the bound on that memory
    file_bytes: int = 0  # what they take in files
    prepared: bool = True  # whether the pool is as large as a release of everything needs
    target_bytes: int = 0  # capacity after the growth under way; ``capacity_bytes`` if there is none
    unused_bytes: int = 0  # of ``capacity_bytes``, kept for the next release; given back according to the retention
    shared_store: SharedStoreStatus | None = None  # the rest is of this process alone


@dataclass(frozen=True)
class Progress:
    """Progress of the operation in flight."""

    operation: str  # ``release``, ``resume``, or ``""`` if none is in flight
    done_bytes: int  # bytes of content processed so far (copied, or found unchanged)
    total_bytes: int  # bytes of content to process
    copied_bytes: int  # bytes copied over the link so far
    seconds: float  # since the operation began


@dataclass(frozen=True)
class Status:
    """What the saver of this process holds. Reading it never waits for an operation in flight and calls no driver."""

    enabled: bool  # False if memsaver is disabled
    driver: str  # ``cuda``, ``host`` or ``none``
    state: str  # ``resident``, ``releasing``, ``released``, ``resuming`` or ``failed``
    failure: str  # why the state is ``failed``, else an empty string
    tags: tuple[TagStatus, ...]
    host_backup: HostBackupStatus
    progress: Progress
    hibernated: bool = False  # the CUDA context is given back, too; CUDA calls of this process block until the resume
    communicators: tuple[CommunicatorStatus, ...] = ()  # those of more than one rank, as last counted
    shared: tuple[str, ...] = ()  # what ranks share of device memory besides, which stays, and what to change
    reserved_by_device: Mapping[int, int] = field(default_factory=dict)  # bytes held for a resume that is prepared
    ranks: tuple[RankStatus, ...] = ()  # the engine's processes, if its memory is in others than this one
