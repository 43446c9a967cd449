"""What an operation did, would do, or does now. All sizes are bytes, all times seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from memsaver_core.contract.model import Model
from memsaver_core.contract.phases import OperationName
from memsaver_core.contract.status import HeldVersion, KvCacheAnswer, PreparedState

#: The statuses of an operation. ``draining``, ``waiting``, ``moving`` and ``finishing`` are all ``running`` to callers.
OperationStatus = Literal["queued", "running", "prepared", "succeeded", "failed", "cancelled"]
Ignored = Annotated[tuple[str, ...], Field(description="Unknown fields of the request; absent if there are none.")]


class DeviceDelta(Model):
    """Memory of one device before and after a phase. ``delta_bytes`` is after minus before."""

    index: int
    uuid: str
    used_before_bytes: int
    used_after_bytes: int
    delta_bytes: int


class MeteredDelta(DeviceDelta):
    """Memory of one device before and after an operation."""

    name: str
    total_bytes: int
    process_bytes: int | None


class PhaseReport(Model):
    """One step of an operation; ``name`` is that of a ``Phase``."""

    name: str
    seconds: float
    devices: tuple[DeviceDelta, ...]
    details: Mapping[str, int | float] = Field(
        default={}, description="seconds by kind of work (overlapping), bytes, gigabytes per second"
    )


class TagReport(Model):
    """What an operation did to a tag."""

    tag: str
    restore: str = Field(description="the policy that it was released under, else its own; mixed if its regions differ")
    state: str = Field(description="resident or released, after the operation")
    bytes: int = Field(default=0, description="live bytes under the tag, on all devices")
    released_bytes: int = Field(default=0, description="bytes that this release gave back to the driver")
    resumed_bytes: int = Field(default=0, description="bytes that this resume mapped")
    backed_up_bytes: int = Field(default=0, description="content copied to host memory or disk by this release")
    unchanged_bytes: int = Field(default=0, description="content not copied, because the backup is still equal")
    shared_bytes: int = Field(
        default=0, description="content not copied, because the shared store has it from another process"
    )
    zero_bytes: int = Field(default=0, description="content in all-zero blocks, which need no backup memory")
    restored_bytes: int = Field(default=0, description="content copied back by this resume")
    kept_bytes: int = Field(default=0, description="what the backups of backed_up_bytes take: less if packed")
    already: bool = Field(default=False, description="the tag was in the requested state when the operation began")


class OperationReport(Model):
    """What an operation did, measured."""

    operation: OperationName
    enabled: bool = Field(default=True, description="false if memsaver is disabled and the call was a no-op")
    seconds: float = Field(default=0.0, description="duration of the whole call")
    released_bytes: int = 0
    resumed_bytes: int = 0
    tags: tuple[TagReport, ...] = Field(
        default=(), description="a row for each requested tag; for every tag if none was named"
    )
    phases: tuple[PhaseReport, ...] = Field(default=(), description="its steps, in the order in which they ran")
    devices: tuple[MeteredDelta, ...] = Field(
        default=(), description="memory of each device before and after the whole call"
    )


class ResizeReport(Model):
    """What a resize of a tag did."""

    tag: str
    enabled: bool = Field(default=True, description="false if memsaver is disabled and the call was a no-op")
    seconds: float = Field(default=0.0, description="duration of the work on the memory")
    bytes: int = Field(default=0, description="live bytes under the tag, on all devices, mapped or not")
    shrunk_bytes: int = Field(default=0, description="of these, given back to the driver now")
    released_bytes: int = Field(default=0, description="that this resize gave back")
    resumed_bytes: int = Field(default=0, description="that this resize mapped again")


class ResizedReport(OperationReport):
    """What a resize of the KV cache did, measured."""

    kv_cache: KvCacheAnswer = Field(description="The cache after that.")


class OperationAnswer(OperationReport):
    """What an operation did."""

    success: bool
    message: str
    operation_id: str
    state: str
    weights_version: HeldVersion = None
    coordinator: str = Field(
        default="", description="The coordinator of a fleet that holds this memory; absent if it is the caller."
    )
    ignored: Ignored = ()


class ResizedAnswer(ResizedReport, OperationAnswer):
    """What a resize of the KV cache did."""


def held_by(coordinator: str) -> str:
    """Return the end of a message that says who else moves this memory."""
    return f". {coordinator} holds this memory, and may bring it to what it wants within seconds: ask that instead"


class Room(Model):
    """Bytes that are needed somewhere, and free there."""

    needed_bytes: int
    free_bytes: int

    @property
    def is_short(self) -> bool:
        return self.needed_bytes > self.free_bytes


class DeviceRoom(Room):
    index: int


class DiskRoom(Room):
    disk: int = Field(default=0, description="The number of the file system on its host; 0 if nothing is needed.")


class PlannedTag(Model):
    """A tag in a dry run: ``bytes`` of device memory, and the further ``backup_bytes`` that its backup will need."""

    tag: str
    restore: str = Field(description="the policy that the release would use, or the region's own")
    bytes: int
    backup_bytes: int = 0
    loses_content: bool = Field(
        default=False, description="Its content would have to be written before it is used again."
    )


class PlanAnswer(Model):
    """What an operation would do. With ``blockers`` it would fail, for these reasons."""

    success: Literal[True] = True
    message: str
    dry_run: Literal[True] = True
    operation: OperationName
    tags: tuple[PlannedTag, ...]
    host: Room
    file: DiskRoom
    devices: tuple[DeviceRoom, ...]
    blockers: tuple[str, ...]
    ignored: Ignored = ()

    @property
    def is_short(self) -> bool:
        return any(room.is_short for room in (self.host, self.file, *self.devices))


class FleetPlanAnswer(Model):
    """What every engine of a fleet says to a dry run: with ``blockers`` it would fail, for these reasons. Tags, and
    what is short, are in the engines' own answers."""

    tags: ClassVar[tuple[PlannedTag, ...]] = ()
    is_short: ClassVar[bool] = False

    message: str
    dry_run: Literal[True] = True
    operation: OperationName
    blockers: tuple[str, ...]


class PreparedAnswer(PreparedState):
    """An operation that waits for its commit. ``tags`` says what it will do; ``expected_s`` estimates how long that
    takes, null if there was none like it; ``message`` says how to go on."""

    success: Literal[True] = True
    message: str
    prepared: Literal[True] = True
    expected_s: float | None
    tags: tuple[PlannedTag, ...]
    ignored: Ignored = ()


class AcceptedAnswer(Model):
    """An operation that continues in the background; its status is at ``location``."""

    success: bool = True
    message: str
    operation: OperationName
    operation_id: str
    status: str
    location: str
    ignored: Ignored = ()


class ErrorDetails(Model):
    """The error; with the figures and names of its kind."""

    model_config = ConfigDict(extra="allow")

    type: str
    message: str
    phase: str | None = Field(default=None, description="The phase of an operation that failed or stalls.")


class ErrorAnswer(Model):
    """What failed, on what, and what to do."""

    model_config = ConfigDict(extra="allow")

    success: Literal[False] = False
    message: str
    error: ErrorDetails


class ProgressAnswer(Model):
    """The progress of an operation's copies. ``seconds_left`` is null while it cannot be estimated."""

    done_bytes: int
    total_bytes: int
    copied_bytes: int
    gb_per_s: float
    seconds_left: float | None


class Stall(Model):
    """A phase without progress for longer than MEMSAVER_PHASE_TIMEOUT_S. The operation continues."""

    phase: str
    seconds: float


class OperationStatusAnswer(Model):
    """An operation in any status. ``answer`` is its caller's answer once it has ended."""

    operation_id: str
    operation: OperationName
    status: OperationStatus
    phase: str
    stalled: Stall | None
    tags: tuple[str, ...] | None
    client: str
    callers: int = Field(description="How many calls it answers.")
    created_at: float
    started_at: float | None
    finished_at: float | None
    seconds: float
    progress: ProgressAnswer | None
    phases: tuple[PhaseReport, ...]
    # A fleet's answer to an operation that failed has the fields of both.
    answer: ErrorAnswer | ResizedAnswer | OperationAnswer | None = Field(union_mode="left_to_right")


class OperationsAnswer(Model):
    operations: tuple[OperationStatusAnswer, ...]


class MessageAnswer(Model):
    success: Literal[True] = True
    message: str
    status: Literal["ok"] = "ok"
    ignored: Ignored = ()


class WrittenAnswer(MessageAnswer):
    """What the weights are after an update, or after other content was written."""

    weights_version: HeldVersion = None
