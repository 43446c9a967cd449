"""The JSON of the service: what it accepts and what it answers. All sizes are bytes, all times seconds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from memsaver_server.engine import DrainMode

Tags = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=1024)]
Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)]


class Fields(BaseModel):
    """Base of what is accepted: a field that is null counts as absent, an unknown one is ignored."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)


class ReleaseFields(Fields):
    """What a release takes, all of it optional."""

    tags: Tags | None = Field(default=None, description="Tags to release; none or an empty list means all.")
    timeout_s: Seconds | None = Field(default=None, description="How long requests in flight may take to end.")
    mode: DrainMode = Field(default="wait", description="What happens to requests in flight.")
    restore: dict[str, Literal["discard", "zero", "host", "file"]] = Field(
        default_factory=dict, description="Restore policies per tag, for this release alone."
    )
    at_least_bytes: Annotated[int, Field(ge=1, lt=1 << 63)] | None = Field(
        default=None, description="Release only as many tags as give this back, the cheapest first."
    )
    trim: bool | None = Field(
        default=None, description="Also give back what libraries keep for speed; by default before hibernating."
    )
    hibernate: bool = Field(default=False, description="Last of all, give back the CUDA context; any resume wakes it.")
    wait: bool = Field(default=False, description="Queue behind a conflicting operation instead of refusing.")
    run_async: bool = Field(default=False, alias="async", description="Answer 202 with the operation's address.")


class ResumeFields(Fields):
    """What a resume takes, all of it optional."""

    tags: Tags | None = Field(default=None, description="Tags to resume; none means all that is released.")
    wait_for_memory_s: Seconds = Field(default=0.0, description="How long to wait for others to free device memory.")
    wait: bool = Field(default=False, description="Queue behind a conflicting operation instead of refusing.")
    run_async: bool = Field(default=False, alias="async", description="Answer 202 with the operation's address.")


class PauseFields(Fields):
    """What a pause takes. ``retract`` and ``in_place`` are SGLang's words for ``keep``."""

    mode: Literal["abort", "wait", "keep", "retract", "in_place"] = "abort"
    timeout_s: Seconds | None = None


class NoFields(Fields):
    """A body whose fields are all ignored, but which must be JSON where there is one."""


class UpdateFromDiskFields(Fields):
    """SGLang's weight update from a checkpoint folder of the same shape."""

    model_config = ConfigDict(protected_namespaces=())

    model_path: str
    flush_cache: bool = True
    abort_all_requests: bool = False


class UpdateFromTensorFields(Fields):
    """SGLang's weight update from tensors: one payload for each rank."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class SleepFields(Fields):
    """vLLM's sleep. Level 0 pauses scheduling, 1 releases and keeps the weights, 2 releases and discards them; 3 is
    ours: as 1, and the process hibernates."""

    level: Annotated[int, Field(ge=0, le=3)] = 1
    mode: DrainMode = "abort"
    tags: Tags | None = None
    timeout_s: Seconds | None = None
    wait: bool = False


class WakeFields(Fields):
    """vLLM's wake-up. The tag ``scheduling`` alone undoes a sleep of level 0."""

    tags: Tags | None = None
    wait_for_memory_s: Seconds = 0.0
    wait: bool = False


class DeviceAnswer(BaseModel):
    """A device before and after."""

    index: int
    uuid: str
    used_before_bytes: int
    used_after_bytes: int
    delta_bytes: int


class MeteredDeviceAnswer(DeviceAnswer):
    name: str
    total_bytes: int
    process_bytes: int | None


class PhaseAnswer(BaseModel):
    name: str
    seconds: float
    devices: list[DeviceAnswer]
    details: dict[str, float]


class TagAnswer(BaseModel):
    """What an operation did to a tag."""

    tag: str
    restore: str
    state: str
    bytes: int
    released_bytes: int
    resumed_bytes: int
    backed_up_bytes: int
    unchanged_bytes: int
    zero_bytes: int
    restored_bytes: int
    already: bool


class OperationAnswer(BaseModel):
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


class AcceptedAnswer(BaseModel):
    """An operation that goes on by itself: ``location`` tells what becomes of it."""

    success: bool
    message: str
    operation: Literal["release", "resume"]
    operation_id: str
    status: str
    location: str


class ErrorDetails(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    message: str
    phase: str | None = Field(default=None, description="The phase of an operation that failed or is stuck.")


class ErrorAnswer(BaseModel):
    """What went wrong, to what, and what to do."""

    model_config = ConfigDict(extra="allow")

    success: Literal[False]
    message: str
    error: ErrorDetails


class ProgressAnswer(BaseModel):
    """How far the content of an operation is. ``seconds_left`` is null where nothing can be said yet."""

    done_bytes: int
    total_bytes: int
    copied_bytes: int
    gb_per_s: float
    seconds_left: float | None


class StallAnswer(BaseModel):
    """A phase that has made no progress for longer than MEMSAVER_PHASE_TIMEOUT_S. The operation goes on."""

    phase: str
    seconds: float


class OperationStatusAnswer(BaseModel):
    """An operation, whether it waits, runs or is done. ``answer`` is what its caller got, once it is done."""

    operation_id: str
    operation: Literal["release", "resume"]
    status: Literal["queued", "running", "succeeded", "failed"]
    phase: str
    stalled: StallAnswer | None
    tags: list[str] | None
    client: str
    created_at: float
    started_at: float | None
    finished_at: float | None
    seconds: float
    progress: ProgressAnswer | None
    phases: list[PhaseAnswer]
    answer: OperationAnswer | ErrorAnswer | None


class OperationsAnswer(BaseModel):
    operations: list[OperationStatusAnswer]


class SourceAnswer(BaseModel):
    """Who holds how much of a device. ``kind`` says what the name is: a tag may have any."""

    kind: Literal["tag", "torch", "cache", "graphs", "process", "others", "unexplained"]
    name: str
    bytes: int


class OccupiedDeviceAnswer(BaseModel):
    """A device now. ``sources`` says what holds its memory: their sum is ``used_bytes``."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    free_bytes: int
    process_bytes: int | None
    sources: list[SourceAnswer]


class TagStatusAnswer(BaseModel):
    """What a tag holds now."""

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


class HostBackupAnswer(BaseModel):
    bytes: int
    capacity_bytes: int
    limit_bytes: int
    file_bytes: int
    prepared: bool


class AdmissionAnswer(BaseModel):
    """Whether requests are taken now, and why not."""

    open: bool
    reason: str


class OccupationAnswer(BaseModel):
    """What the process holds of its devices now."""

    enabled: bool
    driver: str
    state: str
    hibernated: bool
    engine: str
    admission: AdmissionAnswer
    operation_id: str | None
    tags: list[TagStatusAnswer]
    devices: list[OccupiedDeviceAnswer]
    host_backup: HostBackupAnswer


class MessageAnswer(BaseModel):
    success: Literal[True]
    message: str
    status: Literal["ok"]


class SleepingAnswer(BaseModel):
    is_sleeping: bool


class MemoryStatusAnswer(BaseModel):
    """TensorRT-LLM's view: ``running``, ``parking``, ``parked``, ``waking`` or ``failed``."""

    state: str
    parked_tags: list[str]


class HealthAnswer(BaseModel):
    status: str
    state: str
    reason: str
