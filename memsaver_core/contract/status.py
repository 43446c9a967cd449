"""What is held now. All sizes are bytes, all times seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from memsaver_core.contract.model import Model
from memsaver_core.contract.phases import Verb

HeldVersion = Annotated[str | None, Field(description="Named by the last update; null if none, and for a fleet.")]


class DeviceMemory(Model):
    """Memory of one device at one moment."""

    index: int = Field(description="torch's index of the device in this process, or the number of the host device")
    uuid: str = Field(description="the driver's identifier, independent of CUDA_VISIBLE_DEVICES")
    name: str
    total_bytes: int = Field(description="the device's memory without what its driver reserves")
    used_bytes: int = Field(description="in use by all processes, as nvidia-smi shows it")
    process_bytes: int | None = Field(description="in use by this process; null if the driver does not say")

    @property
    def unused_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


class Consumer(Model):
    """One consumer of device memory.

    ``kind`` is ``tag``: a region, including free ranges inside its chunks; ``torch``: tensors outside regions;
    ``cache``: torch's cache outside regions; ``graphs``: captured CUDA graphs, beside their tensors; ``reserved``: held
    for a resume that is prepared; ``process``: the rest of this process: context, modules, libraries; ``others``: other
    processes; ``unexplained``: the rest, if the driver does not count by process. A tag may have the
    name of another consumer.
    """

    kind: Literal["tag", "torch", "cache", "graphs", "process", "reserved", "others", "unexplained"]
    name: str = Field(description="the tag, or a description of the kind")
    bytes: int


class OccupiedDevice(DeviceMemory):
    """A device now. ``sources`` are the consumers of its memory; their sum is ``used_bytes``."""

    free_bytes: int
    sources: tuple[Consumer, ...]


@dataclass(frozen=True)
class TorchMemory:
    """What torch's allocator holds of one device."""

    reserved_bytes: int  # all segments; those of regions count whether mapped or released
    cached_bytes: int | None  # free memory in segments outside of regions; None if counting it would take too long


class TagOccupation(Model):
    """What a tag holds now."""

    tag: str
    restore: str = Field(description="its policy; ``mixed`` if its regions differ")
    state: str = Field(description="resident, releasing, released or resuming")
    content: Literal["ok", "lost"] = Field(default="ok", description="lost: discarded, and not written since.")
    bytes: int = Field(description="live bytes, on all devices, mapped or not")
    resident_bytes: int = Field(description="live bytes that are mapped")
    released_bytes: int = Field(description="live bytes that are released")
    shrunk_bytes: int = Field(
        default=0, description="live bytes that a resize gave back; only a resize brings them back"
    )
    retained_bytes: int = Field(description="mapped bytes that no live allocation uses: free ranges in shared chunks")
    backed_up_bytes: int = Field(description="live content with a backup in host memory or on disk")
    kept_bytes: int = Field(default=0, description="what these backups take: less if packed, nothing for zeros")
    allocations: int = Field(description="number of live allocations (torch's segments)")
    chunks: int = Field(description="number of physical handles")


def discarded(tags: Iterable[str]) -> str:
    """Return why an engine that has lost the content of ``tags`` serves no request, and what to do."""
    return (
        f"the content of {', '.join(sorted(tags))} was discarded by a release; write it by the engine's weight update, "
        "or POST /content_written once it is written in another way"
    )


class TagStatus(TagOccupation):
    """What a tag holds now, with what only the core needs."""

    mapped_by_device: Mapping[int, int] = {}  # mapped bytes, retained too, by device index
    bytes_by_device: Mapping[int, int] = {}  # live bytes, mapped or not, by device index
    shrunk_by_device: Mapping[int, int] = {}  # live bytes that a resize gave back, by device index
    integrated_bytes: int = 0  # mapped bytes on devices that have no memory but the host's
    expected_bytes: int = 0  # host memory that a backup of what is resident is expected to take besides; 0 while busy
    expected_file_bytes: int = 0  # likewise, of space in files if its policy is ``file``


class CommunicatorStatus(Model):
    """One communicator of a process: what lets its ranks exchange device memory."""

    name: str = Field(description="the same on all of its ranks, and of no other communicator that a rank has")
    ranks: int = Field(description="how many ranks it has")
    rank: int = Field(description="this process's number among them")
    suspendable_bytes: int = Field(default=0, description="bytes that suspending it would give back; 0 while suspended")
    suspended_bytes: int = Field(default=0, description="bytes that it gave back and takes again; 0 unless suspended")
    persistent_bytes: int = Field(default=0, description="device memory that stays")
    suspended: bool = False
    obstacle: str = Field(default="", description="why it cannot be suspended and what to do; empty if it can")


class RankStatus(Model):
    """One process of an engine that has several."""

    rank: int
    pid: int | None = Field(description="null if it does not use memsaver")
    alive: bool | None = Field(
        description="null if it cannot be watched: it is in another container or on another host"
    )
    state: str = Field(description="the state of its memory, after its last operation")
    stopped: bool = Field(default=False, description="a signal or a debugger has stopped it")
    dp_rank: int | None = Field(default=None, description="the data-parallel engine it is of, if the server has some")


class SharedStoreStatus(Model):
    """The store of host memory that several processes use (``MEMSAVER_SHARED_BACKUPS``)."""

    name: str
    processes: int = Field(description="processes that take part in it")
    held_bytes: int = Field(description="bytes of blocks that this process uses")
    share_bytes: int = Field(description="the same, each block divided by the number of processes that use it")
    used_bytes: int = Field(description="bytes of blocks that any process uses")
    total_bytes: int = Field(description="its memory")
    limit_bytes: int = Field(description="the bound on its memory, for all processes together")


class HostBackup(Model):
    """Host memory and files that hold backups."""

    bytes: int = Field(
        default=0, description="what backups take, in memory and in files; less than their content if packed"
    )
    capacity_bytes: int = Field(default=0, description="pinned memory that the pool has ready")
    limit_bytes: int = Field(default=0, description="the bound on that memory")
    file_bytes: int = Field(default=0, description="what backups take in files")
    prepared: bool = Field(default=True, description="the pool is as large as a release of everything needs")
    unused_bytes: int = Field(default=0, description="of capacity_bytes, kept for the next release")
    shared_store: SharedStoreStatus | None = Field(
        default=None, description="null if none is used; all other fields are of this process alone"
    )


class HostBackupStatus(HostBackup):
    """Host memory and files that hold backups, with what only the core needs."""

    target_bytes: int = 0  # capacity after the growth under way; ``capacity_bytes`` if there is none

    def room_bytes(self, available_bytes: int) -> int:
        """Return how many more bytes backups may take, within the limit: ``available_bytes`` of the host, and unused
        pinned memory, ready or growing."""
        if (store := self.shared_store) is not None:
            used, pinned, limit = store.used_bytes, store.total_bytes, store.limit_bytes
        else:
            pinned = max(self.capacity_bytes, self.target_bytes)
            used, limit = self.bytes - self.file_bytes, self.limit_bytes
        return max(0, min(limit - used, max(0, pinned - used) + available_bytes))


class Progress(Model):
    """Progress of the operation in flight."""

    operation: str = ""  # ``release``, ``resume``, or ``""`` if none is in flight
    done_bytes: int = 0  # bytes of content processed so far (copied, or found unchanged)
    total_bytes: int = 0  # bytes of content to process
    copied_bytes: int = 0  # bytes copied over the link so far
    seconds: float = 0.0  # since the operation began


class Status(Model):
    """What the saver of a process holds. Reading it never waits for an operation in flight and calls no driver."""

    enabled: bool  # False if memsaver is disabled
    driver: str  # ``cuda``, ``host`` or ``none``
    state: str  # ``resident``, ``releasing``, ``released``, ``resuming`` or ``failed``
    failure: str = ""  # why the state is ``failed``, else an empty string
    tags: tuple[TagStatus, ...] = ()
    host_backup: HostBackupStatus = Field(default_factory=HostBackupStatus)
    progress: Progress = Field(default_factory=Progress)
    hibernated: bool = False  # the CUDA context is given back, too; CUDA calls of this process block until the resume
    communicators: tuple[CommunicatorStatus, ...] = ()  # those of more than one rank, as last counted
    shared: tuple[str, ...] = ()  # what ranks share of device memory besides, which stays, and what to change
    reserved_by_device: Mapping[int, int] = {}  # bytes held for a resume that is prepared
    ranks: tuple[RankStatus, ...] = ()  # the engine's processes, if its memory is in others than this one


class AdmissionStatus(Model):
    """Whether requests are accepted now, and if not why."""

    open: bool
    reason: str


class PreparedState(Model):
    """The operation that waits for its commit, for ``lease_s`` more seconds; ``client`` prepared it."""

    operation_id: str
    client: str
    operation: Verb
    lease_s: float

    def text(self) -> str:
        left = f"{self.lease_s:.0f} s are left for its commit"
        return f"{self.operation} {self.operation_id} of {self.client}; {left}"


#: The header in which a coordinator that holds an engine gives its name when it reads the occupation.
COORDINATOR_HEADER = "Memsaver-Coordinator"


class KvCacheAnswer(Model):
    """The KV cache of an engine now. Sizes are bytes of device memory that its pages take, in all layers together."""

    bytes: int = Field(description="The size of the cache.")
    used_bytes: int = Field(description="Of it, what requests in flight use.")
    reused_bytes: int = Field(
        default=0, description="Of it, prefixes that requests have found there in the last 20 to 40 seconds."
    )
    smallest_bytes: int = Field(description="The smallest size now for which no request has to end or be preempted.")
    largest_bytes: int = Field(description="The largest size that free device memory allows now, but for rounding.")
    full_bytes: int = Field(description="The size with which the engine began.")
    limit_bytes: int | None = Field(default=None, description="Set by a caller's last resize, if the cache balances.")
    tokens: int = Field(description="Room for so many tokens.")
    page_bytes: int
    page_tokens: int
    recomputed: int = Field(
        default=0, description="Prefixes computed again since the start, as the cache had no room to keep them."
    )


class OccupationAnswer(Model):
    """What an engine holds on its devices now."""

    enabled: bool
    driver: str
    state: str
    hibernated: bool
    engine: str
    weights_version: HeldVersion = None
    engine_id: str = Field(default="", description="The service's id: two addresses with the same id are one engine.")
    model: str = Field(default="", description="What the engine serves; empty if it does not say.")
    admission: AdmissionStatus
    operation_id: str | None
    updating: bool = Field(
        default=False,
        description="An update writes now: a release or a resume waits for it. Of a fleet: on any engine.",
    )
    prepared: PreparedState | None = None
    coordinator: str = Field(
        default="", description="The coordinator of a fleet that holds this memory; empty if none has asked lately."
    )
    tags: tuple[TagOccupation, ...]
    communicators: tuple[CommunicatorStatus, ...] = ()
    kv_cache: KvCacheAnswer | None = Field(default=None, description="null if the engine cannot resize it")
    shared_by_ranks: tuple[str, ...] = Field(
        default=(), description="Other device memory that ranks share, which no release gives back; what to change."
    )
    devices: tuple[OccupiedDevice, ...]
    host_backup: HostBackup
    host_id: str = Field(default="", description="Identifies the machine until it is booted again; empty for a fleet.")
    host_bytes: int = Field(default=0, description="Memory of the machine, of a fleet that of all its machines.")
    ranks: tuple[RankStatus, ...] = ()

    @property
    def lost(self) -> tuple[str, ...]:
        """The tags whose content must be written again."""
        return tuple(tag.tag for tag in self.tags if tag.content == "lost")


class MemberRow(Model):
    """One engine of a fleet now."""

    name: str
    url: str
    model: str
    labels: dict[str, str]
    host: str
    gpus: tuple[str, ...]
    alive: bool
    state: str = Field(description="resident, released, mixed, failed, prepared; or unknown if it does not answer.")
    wanted: Literal["released", "resident", "mixed", ""] = Field(description="What the record wants; empty: nothing.")
    error: str = Field(description="Why it does not answer, or serves no request although it does; else empty.")


class EngineRow(MemberRow):
    """One engine now, with what it holds."""

    resident_bytes: int
    released_bytes: int
    requests: int = Field(description="In flight through this coordinator.")


class FleetOccupation(OccupationAnswer):
    """What the engines hold together, and each of them."""

    engines: tuple[EngineRow, ...]
    error: str = Field(default="", description="Why the members or the record cannot be read; empty if they can.")


class HealthAnswer(Model):
    """``reason`` says why the status is not ``ok``."""

    status: str
    state: str
    reason: str
