"""The JSON that the service accepts and answers. All sizes are bytes, all times seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict

from pydantic import BaseModel, Field

from memsaver_server.backup_schemas import HostBackupAnswer

#: What a drain does to requests in flight: ``wait`` until they end; ``abort`` them, each with its output so far;
#: ``keep`` (freeze) them until admission opens.
DrainMode = Literal["wait", "abort", "keep"]

Tags = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=1024)]
Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]
Wait = Annotated[bool, Field(description="Queue behind a conflicting operation instead of answering 409.")]
DryRun = Annotated[bool, Field(description="Only say what would happen and what it would take.")]
Verify = Annotated[
    Literal["token"] | None, Field(description="The tokens of a fixed prompt must be the same before and after.")
]
Async = Annotated[bool, Field(alias="async", description="Answer 202 with the operation's address at once.")]


class Model(BaseModel, defer_build=True):
    """Base of all models. Each is built at its first use: a command imports all of them and uses few."""


class Fields(Model, extra="ignore", populate_by_name=True):
    """Base of requests: a field that is null counts as absent."""


class NoFields(Fields):
    """A body whose fields are ignored. If present it must be JSON."""


class ReleaseFields(Fields):
    """The fields of a release, all optional."""

    tags: Tags | None = Field(default=None, description="Tags to release; absent or empty means all.")
    timeout_s: Seconds | None = Field(default=None, description="Deadline of the drain.")
    mode: DrainMode = Field(default="wait", description="What the drain does to requests in flight.")
    restore: dict[str, Literal["discard", "zero", "host", "file"]] = Field(
        default_factory=dict, description="Restore policies by tag, for this release only."
    )
    at_least_bytes: Annotated[int, Field(ge=1, lt=1 << 63)] | None = Field(
        default=None, description="Release only as many tags as free this much, cheapest first."
    )
    trim: bool | None = Field(
        default=None, description="Also release what libraries cache; by default only when hibernating."
    )
    hibernate: bool = Field(default=False, description="Release the CUDA context last; any resume restores it.")
    verify: Verify = None
    dry_run: DryRun = False
    wait: Wait = False
    run_async: Async = False

    def core_options(self) -> dict[str, Any]:
        """Return the options of the core's release. This is the one place where null and ``[]`` become "all"."""
        return {**_tags(self.tags), **self.model_dump(include={"restore", "trim", "hibernate"})}


class ResumeFields(Fields):
    """The fields of a resume, all optional."""

    tags: Tags | None = Field(default=None, description="Tags to resume; absent or empty means all that are released.")
    wait_for_memory_s: Seconds = Field(
        default=0.0, description="How long to wait until other processes free device memory."
    )
    verify: Verify = None
    dry_run: DryRun = False
    wait: Wait = False
    run_async: Async = False

    def core_options(self) -> dict[str, Any]:
        """Return the options of the core's resume."""
        return _tags(self.tags)


def _tags(tags: list[str] | None) -> dict[str, tuple[str, ...]]:
    return {"tags": tuple(sorted(set(tags or ())))}  # sorted: requests that differ in order are equal


class ReleaseArguments(TypedDict, total=False):
    """The keyword arguments of the clients' ``release``; each is the field of that name in ``ReleaseFields``."""

    timeout_s: float | None
    mode: str | None
    restore: Mapping[str, str] | None
    at_least_bytes: int | None
    trim: bool | None
    hibernate: bool
    verify: str | None
    wait: bool


Ignored = Annotated[list[str], Field(description="Unknown fields of the request; absent if there are none.")]


class DeviceAnswer(Model):
    """A device before and after a phase or an operation."""

    index: int
    uuid: str
    used_before_bytes: int
    used_after_bytes: int
    delta_bytes: int


class MeteredDeviceAnswer(DeviceAnswer):
    name: str
    total_bytes: int
    process_bytes: int | None


class PhaseAnswer(Model):
    name: str
    seconds: float
    devices: list[DeviceAnswer]
    details: dict[str, float]


class TagAnswer(Model):
    """What an operation did to a tag."""

    tag: str
    restore: str
    state: str
    bytes: int
    released_bytes: int
    resumed_bytes: int
    backed_up_bytes: int
    unchanged_bytes: int
    shared_bytes: int = 0
    zero_bytes: int
    restored_bytes: int
    kept_bytes: int = 0
    already: bool


class OperationAnswer(Model):
    """What a release or a resume did."""

    success: bool
    message: str
    enabled: bool
    operation: Literal["release", "resume"]
    operation_id: str
    state: str
    seconds: float
    released_bytes: int
    resumed_bytes: int
    tags: list[TagAnswer]
    phases: list[PhaseAnswer]
    devices: list[MeteredDeviceAnswer]
    ignored: Ignored = []


class RoomAnswer(Model):
    needed_bytes: int
    free_bytes: int


class PlannedDeviceAnswer(RoomAnswer):
    index: int


class PlannedTagAnswer(Model):
    """A tag in a dry run: ``bytes`` of device memory, and ``backup_bytes`` that its backup is expected to take more."""

    tag: str
    restore: str
    bytes: int
    backup_bytes: int
    loses_content: bool = Field(description="Its content would have to be written before it is used again.")


class PlanAnswer(Model):
    """What a release or a resume would do. With ``blockers`` it would fail, for these reasons."""

    success: Literal[True]
    message: str
    dry_run: Literal[True]
    operation: Literal["release", "resume"]
    tags: list[PlannedTagAnswer]
    host: RoomAnswer
    file: RoomAnswer
    devices: list[PlannedDeviceAnswer]
    blockers: list[str]
    ignored: Ignored = []


class AcceptedAnswer(Model):
    """An operation that continues in the background; its status is at ``location``."""

    success: bool
    message: str
    operation: Literal["release", "resume"]
    operation_id: str
    status: str
    location: str
    ignored: Ignored = []


class ErrorDetails(Model, extra="allow"):
    type: str
    message: str
    phase: str | None = Field(default=None, description="The phase of an operation that failed or stalls.")


class ErrorAnswer(Model, extra="allow"):
    """What failed, on what, and what to do."""

    success: Literal[False]
    message: str
    error: ErrorDetails


class ProgressAnswer(Model):
    """The progress of an operation's copies. ``seconds_left`` is null while it cannot be estimated."""

    done_bytes: int
    total_bytes: int
    copied_bytes: int
    gb_per_s: float
    seconds_left: float | None


class StallAnswer(Model):
    """A phase without progress for longer than MEMSAVER_PHASE_TIMEOUT_S. The operation continues."""

    phase: str
    seconds: float


class OperationStatusAnswer(Model):
    """An operation in any status. ``answer`` is its caller's answer once it has ended."""

    operation_id: str
    operation: Literal["release", "resume"]
    status: Literal["queued", "running", "prepared", "succeeded", "failed", "cancelled"]
    phase: str
    stalled: StallAnswer | None
    tags: list[str] | None
    client: str
    callers: int = Field(description="How many calls it answers.")
    created_at: float
    started_at: float | None
    finished_at: float | None
    seconds: float
    progress: ProgressAnswer | None
    phases: list[PhaseAnswer]
    # A fleet's answer to an operation that failed has the fields of both.
    answer: ErrorAnswer | OperationAnswer | None = Field(union_mode="left_to_right")


class OperationsAnswer(Model):
    operations: list[OperationStatusAnswer]


class SourceAnswer(Model):
    """One consumer of device memory. ``kind`` tells tags, which may have any name, from other consumers."""

    kind: Literal["tag", "torch", "cache", "graphs", "process", "reserved", "others", "unexplained"]
    name: str
    bytes: int


class OccupiedDeviceAnswer(Model):
    """A device now. ``sources`` are the consumers of its memory; their sum is ``used_bytes``."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    process_bytes: int | None
    sources: list[SourceAnswer]


class TagStatusAnswer(Model):
    """What a tag holds now."""

    tag: str
    restore: str
    state: str
    content: Literal["ok", "lost"] = Field(default="ok", description="lost: discarded, and not written since.")
    bytes: int
    resident_bytes: int
    released_bytes: int
    retained_bytes: int
    backed_up_bytes: int
    kept_bytes: int = 0
    allocations: int
    chunks: int


class AdmissionAnswer(Model):
    """Whether requests are accepted now, and if not why."""

    open: bool
    reason: str


class PreparedState(Model):
    """The operation that waits for its commit, for ``lease_s`` more seconds."""

    operation_id: str
    operation: Literal["release", "resume"]
    lease_s: float


class OccupationAnswer(Model):
    """What the process holds on its devices now."""

    enabled: bool
    driver: str
    state: str
    hibernated: bool
    engine: str
    model: str = Field(default="", description="What the engine serves; empty if it does not say.")
    admission: AdmissionAnswer
    operation_id: str | None
    prepared: PreparedState | None = None
    tags: list[TagStatusAnswer]
    communicators: list[dict[str, str | int | bool]] = []  # fields of memsaver_core.CommunicatorStatus
    shared_by_ranks: list[str] = Field(
        default=[], description="Other device memory that ranks share, which no release gives back; what to change."
    )
    devices: list[OccupiedDeviceAnswer]
    host_backup: HostBackupAnswer
    ranks: list[dict[str, int | str | bool | None]] = []  # fields of memsaver_core.RankStatus, and stopped


class MessageAnswer(Model):
    success: Literal[True]
    message: str
    status: Literal["ok"]
    ignored: Ignored = []


class HealthAnswer(Model):
    status: str
    state: str
    reason: str
