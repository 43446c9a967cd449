"""What callers ask of a release and of a resume: each option once. Sizes are bytes, times seconds.

Made from these models: the service's JSON, the clients' keywords, the command line's options, messages to ranks, what a
fleet sends and records, and the documentation. A new option is one field here, the line that acts on it, and a test.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator
from typing_extensions import Self

from memsaver_core.contract.model import Model
from memsaver_core.contract.phases import OperationName as OperationName
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.phases import Verb as Verb
from memsaver_core.contract.policies import COMMUNICATORS, RestorePolicy

OPPOSITE: dict[OperationName, Verb] = {"release": "resume", "resume": "release"}
#: The state in which each operation leaves the memory.
STATES: dict[OperationName, Literal["released", "resident"]] = {"release": "released", "resume": "resident"}
#: What a drain does to requests in flight: ``wait`` until they end; ``abort`` them, each with its output so far;
#: ``keep`` (freeze) them until admission opens.
DrainMode = Literal["wait", "abort", "keep"]
#: What a resize of the KV cache does to requests that use pages to be given back: ``wait`` until they end; ``preempt``
#: them, so that they are computed again.
CacheMode = Literal["wait", "preempt"]
#: ``all``: every selected engine or none; ``best_effort``: what can be done, and the rest is listed.
FleetMode = Literal["all", "best_effort"]

#: vLLM's tag for scheduling: a sleep of level 0 stops it, a wake-up of this tag alone continues it.
SCHEDULING = "scheduling"

#: How long an operation stays prepared without its commit, if its caller does not say, seconds.
DEFAULT_LEASE_S = 30.0
#: Deadline of a drain that a fleet asks for, seconds, if its caller names none.
FLEET_TIMEOUT_S = 60.0
#: How long a fleet's coordinator waits for an engine that does not answer by default, seconds.
DEFAULT_SILENCE_S = 10.0


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("Input should be a number, not true or false")
    return value


_IsNumber = BeforeValidator(_number)  # else pydantic takes true for 1
Tags = Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=1024)]
#: A caller's name for what the weights hold: the step of a trainer, a revision.
WeightsVersion = Annotated[str, Field(min_length=1, max_length=256)]
Seconds = Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False), _IsNumber]
Bytes = Annotated[int, Field(ge=1, lt=1 << 63), _IsNumber]
#: Numbers of data-parallel engines.
DpRanks = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 16), _IsNumber], ...], Field(max_length=1024)]
OperationId = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.:-]+$")]


@dataclass(frozen=True)
class Acts:
    """Where a field acts. ``by`` the core: it says what becomes of the memory, and is sent to ranks; by the service: it
    says how the operation runs; by the caller: it concerns this one call, and leaves the operation the same."""

    by: Literal["core", "service", "caller"]
    fleet: str = "each"  # each: sent to every engine; own: the coordinator acts on it; else why a fleet refuses it
    lasting: bool = False  # a fleet uses it also for engines that join later, so its record keeps it
    waits_in: Phase | None = None  # it is how long this phase may wait, seconds


_PREPARED_BY_FLEET = "a fleet prepares and commits by itself; send the operation without prepare, lease_s and commit"


class Fields(Model):
    """A field that is null counts as absent; one that does not exist is an error."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, protected_namespaces=())


class Tagged(Fields):
    """The tags that a call is about; none means all."""

    tags: Annotated[Tags, Acts("core", lasting=True)] = Field(default=(), description="Which; absent or empty: all.")

    @field_validator("tags", mode="after")
    @classmethod
    def _without_repeats(cls, tags: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tags))

    def concerns(self, tag: str) -> bool:
        """Return whether the call is about ``tag``."""
        return not self.tags or tag in self.tags


class MemoryRequest(Tagged):
    """What becomes of the memory: all that the core and the ranks are given."""

    restore: Annotated[Mapping[str, RestorePolicy], Acts("core", lasting=True)] = Field(
        default={}, description="Restore policies by tag, for this release only."
    )
    trim: Annotated[bool | None, Acts("core", lasting=True)] = Field(
        default=None, description="Also release what libraries cache; by default only when hibernating."
    )
    hibernate: Annotated[bool, Acts("core", lasting=True)] = Field(
        default=False, description="Release the CUDA context last; any resume restores it."
    )
    communicators: Annotated[Literal["suspend", "keep"] | None, Acts("core", lasting=True)] = Field(
        default=None,
        description="suspend: NCCL's memory goes, too; keep: it stays, which is faster. See MEMSAVER_COMMUNICATORS.",
    )

    @model_validator(mode="after")
    def _suspended_with_the_context(self) -> Self:
        if self.communicators == "keep" and (self.hibernate or COMMUNICATORS in self.tags):
            raise ValueError('"communicators": "keep" contradicts hibernate and the tag communicators: leave it out')
        return self

    @property
    def trims(self) -> bool:
        """Whether what libraries cache is released, too."""
        return self.hibernate if self.trim is None else self.trim


class _Operation(Fields):
    """What may be asked of every operation."""

    operation: ClassVar[OperationName]

    dry_run: Annotated[bool, Acts("caller", fleet="own")] = Field(
        default=False, description="Only say what would happen and what it would take."
    )
    wait: Annotated[bool, Acts("caller", fleet="own")] = Field(
        default=False, description="Queue behind a conflicting operation instead of answering 409."
    )
    run_async: Annotated[bool, Acts("caller", fleet="own")] = Field(
        default=False, alias="async", description="Answer 202 with the operation's address at once."
    )

    @property
    def is_answered_early(self) -> bool:
        """Whether the answer does not wait for the operation's end."""
        return self.dry_run or self.run_async

    def digest(self) -> str:
        """Return what two equal requests have in common, as a digest that is the same in every process and in later
        versions. Fields that concern one call are not in it."""
        names = {name for name, acts in acts_of(type(self)).items() if acts.by != "caller"}
        given = self.model_dump(mode="json", include=names, exclude_defaults=True)
        given = {name: sorted(value) if isinstance(value, list) else value for name, value in given.items()}
        return sha256(json.dumps([self.operation, given], sort_keys=True).encode()).hexdigest()[:32]

    def patience_s(self, phase: str) -> float:
        """Return how long ``phase`` may wait beyond the phase timeout because the caller asked for it, seconds."""
        fields = (name for name, acts in acts_of(type(self)).items() if acts.waits_in == phase)
        return sum(getattr(self, name) or 0.0 for name in fields)

    def resolved(self, drain_timeout_s: float) -> Self:
        """Return the request with the service's drain deadline, if it can have one and names none."""
        deadline = {"timeout_s": drain_timeout_s} if getattr(self, "timeout_s", 0.0) is None else {}
        return self.model_copy(update=deadline)


#: Fields that every operation has.
OF_EVERY_OPERATION = frozenset(_Operation.model_fields)


class OnTags(_Operation, Tagged):
    """What may be asked of a release and of a resume."""

    operation: ClassVar[Verb]

    verify: Annotated[Literal["token"] | None, Acts("service")] = Field(
        default=None, description="The tokens of a fixed prompt must be the same before and after."
    )
    prepare: Annotated[bool, Acts("service", fleet=_PREPARED_BY_FLEET)] = Field(
        default=False,
        description="Do everything except moving memory, answer, and wait for the commit or the lease's end.",
    )
    lease_s: Annotated[float, Field(gt=0, le=3600), _IsNumber, Acts("caller", fleet=_PREPARED_BY_FLEET)] = Field(
        default=DEFAULT_LEASE_S,
        description="With prepare: the operation is undone if no commit comes within this time.",
    )
    dp_ranks: Annotated[
        DpRanks, Acts("service", fleet="a fleet releases and resumes whole servers; send dp_ranks to one of them")
    ] = Field(default=(), description="Which of the server's data-parallel engines, by rank; absent or empty: all.")

    @field_validator("dp_ranks", mode="after")
    @classmethod
    def _sorted(cls, dp_ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(dp_ranks)))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dp_ranks and self.verify is not None:
            raise ValueError("the tokens of verify are computed by any engine of the server: leave out dp_ranks")
        if "lease_s" in self.model_fields_set and not self.prepare:
            raise ValueError('lease_s needs "prepare": true')
        return self

    def resolved(self, drain_timeout_s: float) -> Self:
        """Return the request as the base does, and with sorted tags."""
        return super().resolved(drain_timeout_s).model_copy(update={"tags": tuple(sorted(self.tags))})


class Release(MemoryRequest, OnTags):
    """Gives the memory of tags back to the driver."""

    operation: ClassVar[Verb] = "release"

    timeout_s: Annotated[Seconds | None, Acts("service", waits_in=Phase.DRAIN)] = Field(
        default=None,
        description=f"Deadline of the drain; by default MEMSAVER_DRAIN_TIMEOUT_S, for a fleet {FLEET_TIMEOUT_S:g}.",
    )
    mode: Annotated[DrainMode, Acts("service", lasting=True)] = Field(
        default="wait", description="Requests in flight: wait for them, abort them, or keep (freeze) them."
    )
    at_least_bytes: Annotated[
        Bytes | None,
        Acts("service", fleet="a fleet releases whole tags; send tags instead of at_least_bytes"),
    ] = Field(default=None, description="Release only as many tags as free this much, cheapest first.")

    @model_validator(mode="after")
    def _hibernates_whole(self) -> Self:
        if self.dp_ranks and self.hibernate:
            raise ValueError("a server hibernates with all of its engines: leave out hibernate or dp_ranks")
        return self


class Resume(OnTags):
    """Brings the memory of tags back, at the same addresses."""

    operation: ClassVar[Verb] = "resume"

    wait_for_memory_s: Annotated[Seconds, Acts("service", waits_in=Phase.WAIT_FOR_MEMORY)] = Field(
        default=0.0, description="How long to wait until other processes free device memory."
    )
    weights_version: Annotated[WeightsVersion | None, Acts("service", lasting=True)] = Field(
        default=None, description="Fail unless the last update of the weights named this version."
    )
    kv_cache: Annotated[Literal["whole", "shrink"], Acts("service", lasting=True)] = Field(
        default="whole", description="If memory is short after the wait: fail, or resume with a smaller KV cache."
    )

    @model_validator(mode="after")
    def _shrunk_at_once(self) -> Self:
        if self.kv_cache == "shrink" and self.prepare:
            raise ValueError('what is prepared holds the memory of the whole KV cache: leave out "kv_cache": "shrink"')
        return self


_Cache = Acts("service", fleet="a fleet resizes no KV cache; send this to an engine")


class ResizeKvCache(_Operation):
    """Makes an engine's KV cache smaller or larger while it serves, to one of ``bytes``, ``fraction``, ``tokens``."""

    operation: ClassVar[OperationName] = "resize"
    tags: ClassVar[tuple[str, ...]] = ("kv_cache",)
    prepare: ClassVar[bool] = False
    lease_s: ClassVar[float] = 0.0

    bytes: Annotated[Bytes | None, _Cache] = Field(default=None, description="At most so much device memory.")
    fraction: Annotated[Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), _IsNumber] | None, _Cache] = Field(
        default=None, description="At most so much of the largest size; 1 is all of it."
    )
    tokens: Annotated[Annotated[int, Field(ge=1, lt=1 << 63), _IsNumber] | None, _Cache] = Field(
        default=None, description="Room for at least so many tokens."
    )
    mode: Annotated[CacheMode, _Cache] = Field(
        default="wait", description="Requests that use pages to be given back: wait for their end, or preempt them."
    )
    timeout_s: Annotated[Seconds | None, replace(_Cache, waits_in=Phase.DRAIN)] = Field(
        default=None, description="Deadline of that wait; by default MEMSAVER_DRAIN_TIMEOUT_S."
    )
    wait_for_memory_s: Annotated[Seconds, replace(_Cache, waits_in=Phase.WAIT_FOR_MEMORY)] = Field(
        default=0.0, description="How long to wait until other processes free the device memory to grow."
    )

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if sum(each is not None for each in (self.bytes, self.fraction, self.tokens)) != 1:
            raise ValueError("send one of bytes, fraction and tokens")
        return self


# -- of a fleet -----------------------------------------------------------------------------------------------------


class Described(Protocol):
    """What a selector looks at: an engine of a fleet, as far as it is described."""

    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def gpus(self) -> tuple[str, ...]: ...
    @property
    def labels(self) -> Mapping[str, str]: ...


class Selector(Fields):
    """Selects the engines that match every field given; one without fields selects all."""

    names: tuple[str, ...] = Field(default=(), description="Names of members.")
    models: tuple[str, ...] = Field(default=(), description="What the engines serve.")
    labels: Mapping[str, str] = Field(default={}, description="Labels that a member must have, with these values.")
    hosts: tuple[str, ...] = Field(default=(), description="Hosts on which the engines run.")
    gpus: tuple[str, ...] = Field(default=(), description="UUIDs; an engine matches if it uses one of them.")

    def matches(self, member: Described) -> bool:
        """Return whether ``member``, as far as it is described, is selected."""
        return (
            _any(self.names, [member.name])
            and _any(self.models, [member.model])
            and _any(self.hosts, [member.host])
            and _any(self.gpus, member.gpus)
            and all(member.labels.get(name) == value for name, value in self.labels.items())
        )

    def may_match(self, member: Described) -> bool:
        """Return whether ``member`` could match once its model and GPUs are known, if it does not name them."""
        unknown = {name: () for name, known in (("models", member.model), ("gpus", member.gpus)) if not known}
        return self.model_copy(update=unknown).matches(member)


def _any(wanted: Collection[str], found: Collection[str]) -> bool:
    return not wanted or any(one in wanted for one in found)


class Selected(Fields):
    """Which engines a call is about; by default all."""

    selector: Annotated[Selector, Acts("service", fleet="own")] = Field(
        default_factory=Selector, description="The engines, by names, models, labels, hosts, gpus."
    )
    model: Annotated[Annotated[str, Field(max_length=256)] | None, Acts("service", fleet="own")] = Field(
        default=None, description="Only engines that serve this model."
    )

    @field_validator("selector", mode="before")
    @classmethod
    def _of_some(cls, given: Any) -> Any:
        if isinstance(given, dict) and (empty := [name for name, value in given.items() if value in ([], {})]):
            raise ValueError(f"{empty[0]} is empty; leave it out, or name engines")
        return given

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if self.model is not None and self.selector.models not in ((), (self.model,)):
            raise ValueError("model and selector.models differ; send one of them")
        return self

    def selected(self) -> Selector:
        return self.selector if self.model is None else self.selector.model_copy(update={"models": (self.model,)})


class OfFleet(Selected, _Operation):
    """What may be asked of every operation of a fleet."""

    fleet_mode: Annotated[FleetMode, Acts("service", fleet="own")] = Field(
        default="all", description="all: every engine or none; best_effort: each by itself."
    )
    operation_id: Annotated[OperationId | None, Acts("caller", fleet="own")] = Field(
        default=None, description="The id of the operation; a repeat carries out only what has failed."
    )

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        for name, acts in acts_of(type(self)).items():
            default = type(self).model_fields[name].default
            if acts.fleet not in ("each", "own") and getattr(self, name) != default:
                raise ValueError(acts.fleet)
        return self

    def sent(self) -> dict[str, Any]:
        """Return the fields that every engine is sent: those that the caller set, and what ``resolved`` has put in."""
        names = {name for name in self.model_fields_set if acts_of(type(self))[name].fleet == "each"}
        return self.model_dump(mode="json", by_alias=True, include=names)

    def lasting(self) -> dict[str, Any]:
        """Return the fields, beside the tags, with which engines that join later are brought to the same state."""
        names = {name for name in self.model_fields_set - {"tags"} if acts_of(type(self))[name].lasting}
        return self.model_dump(mode="json", by_alias=True, include=names)


class FleetRelease(Release, OfFleet):
    """A release of the selected engines of a fleet."""

    wake_on_request: Annotated[bool, Acts("service", fleet="own")] = Field(
        default=False, description="A request for its model resumes an engine; otherwise only a resume does."
    )


class FleetResume(Resume, OfFleet):
    """A resume of the selected engines of a fleet."""

    timeout_s: Annotated[Seconds | None, Acts("service", fleet="own")] = Field(
        default=None, description="How long an engine may take to prepare, not counting its wait for memory."
    )


class FleetResize(ResizeKvCache, OfFleet):
    """A resize of the KV caches of the selected engines of a fleet, of each by itself."""

    bytes: Annotated[Bytes | None, Acts("service")] = None
    fleet_mode: Annotated[FleetMode, Acts("service", fleet="own")] = "best_effort"


AskedOfFleet = FleetRelease | FleetResume | FleetResize
#: The requests that move the memory of tags, of which a record keeps what they leave.
ASKED_OF_FLEET: dict[Verb, type[FleetRelease | FleetResume]] = {"release": FleetRelease, "resume": FleetResume}
Asked = Release | Resume | ResizeKvCache


@cache
def acts_of(model: type[Model]) -> dict[str, Acts]:
    """Return where each field of a request acts; fields that only an engine's dialect has are not in it."""
    return {
        name: each for name, field in model.model_fields.items() for each in field.metadata if isinstance(each, Acts)
    }
