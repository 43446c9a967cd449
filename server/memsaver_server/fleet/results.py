"""What a fleet answers. All sizes are bytes, all times seconds."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sized
from typing import Any, Literal

from pydantic import Field

from memsaver_core.contract.errors import AdmissionClosedError, BadRequestError, EngineFailedError, WrongWeightsError
from memsaver_core.contract.model import Model, common
from memsaver_core.contract.reports import OperationAnswer, OperationStatusAnswer
from memsaver_core.contract.requests import FleetMode, OperationName, Selector
from memsaver_core.contract.status import FleetOccupation, MemberRow, OccupationAnswer, TagOccupation, discarded
from memsaver_server.fleet.members import Member
from memsaver_server.fleet.record import Demand, RecordContent, Wanted, version_for, wishes_for

#: Who began an operation: a caller, the models that take turns, or the reconciler.
Origin = Literal["caller", "turns", "reconciler"]
#: What a fleet's operation does now.
Stage = Literal["asking", "preparing", "committing", "aborting", "rolling_back", "ended"]


def state_of(occupation: OccupationAnswer) -> str:
    """Return the state of an engine in one word."""
    return "prepared" if occupation.prepared is not None else occupation.state


def count_of(things: Sized, noun: str = "engine") -> str:
    """Return ``1 engine``, ``2 engines`` and so on."""
    return f"{len(things)} {noun}" if len(things) == 1 else f"{len(things)} {noun}s"


class FleetError(BadRequestError):
    """A fleet's call cannot be carried out; nothing was done."""


class NoEngineError(FleetError, kind="not_found", status=404):
    """No engine is selected, or one that is named is no member."""

    @classmethod
    def check(cls, selector: Selector, found: Collection[object], unknown: Collection[str]) -> None:
        """Raise the error if ``found``, the engines of ``selector``, are none, or any name in it is ``unknown``."""
        if not found:
            raise cls(f"no engine of the fleet matches {selector.model_dump_json(exclude_defaults=True)}")
        if unknown:
            raise cls(f"the fleet has no engine {', '.join(map(repr, unknown))}; nothing was done")


class EngineResult(Model):
    """What an operation did on one engine."""

    name: str
    url: str
    success: bool = Field(description="The engine did it. False also if it was undone because another engine failed.")
    state: str = Field(description="resident, released, mixed, failed, prepared; or unknown if it does not answer.")
    operation_id: str = Field(default="", description="The engine's own operation, if one was started.")
    seconds: float = 0.0
    released_bytes: int = 0
    resumed_bytes: int = 0
    phase: str = Field(default="", description="Stage of the fleet's operation in which this engine failed.")
    kind: str = Field(default="", description="The error in one word.")
    error: str = Field(default="", description="What failed, on what; empty if this engine did not fail.")
    lost: tuple[str, ...] = Field(default=(), description="Tags whose content must be written again.")


class FleetResult(OperationAnswer):
    """What an operation did on every selected engine. Tags, phases and devices are in the engines' own operations."""

    mode: FleetMode
    rolled_back: bool = Field(default=False, description="Memory had been moved on some engines, and was moved back.")
    engines: tuple[EngineResult, ...]

    @property
    def failed(self) -> list[EngineResult]:
        """The engines that failed; not those that were undone because others failed."""
        return [engine for engine in self.engines if engine.error]


class FleetOperationStatusAnswer(OperationStatusAnswer):
    """An operation of the fleet in any status; ``phase`` is its stage, ``engines`` that of each engine."""

    origin: Origin = Field(description="Who began it: a caller, the turns of models, or the reconciler.")
    cause: str = Field(description="Why the coordinator does it, if no caller has asked just now; else empty.")
    answer: FleetResult | dict[str, Any] | None  # type: ignore[assignment]
    engines: dict[str, str]


class FleetOperationsAnswer(Model):
    operations: tuple[FleetOperationStatusAnswer, ...]


class EngineStatus(MemberRow):
    """One engine now. ``occupation`` is null if it does not answer. One that answers serves no request if it has
    failed, its content is lost, or its weights are not of the demanded version."""

    occupation: OccupationAnswer | None = None

    @property
    def tags(self) -> tuple[TagOccupation, ...]:
        return self.occupation.tags if self.occupation else ()

    @property
    def resident_bytes(self) -> int:
        return sum(tag.resident_bytes for tag in self.tags)

    @property
    def released_bytes(self) -> int:
        return sum(tag.released_bytes for tag in self.tags)

    @classmethod
    def of(
        cls, member: Member, occupation: OccupationAnswer | None, error: object, record: RecordContent
    ) -> EngineStatus:
        if occupation is not None:
            _, excluded = serves_nothing(occupation, version_for(member, record.demands))
            error = excluded or error
        return cls(
            **{name: getattr(member, name) for name in Member.__dataclass_fields__ if name != "api_key"},
            alive=occupation is not None,
            state=state_of(occupation) if occupation is not None else "unknown",
            wanted=common(wish.state for wish in wishes_for(member, record.wanted, occupation).values()),
            error=str(error or ""),
            occupation=occupation,
        )


def serves_nothing(now: OccupationAnswer, demanded: str | None) -> tuple[str, str]:
    """Return the kind of error and the reason for which an engine that answers serves no request: it has failed, or all
    its memory is resident but holds the wrong content. Both are empty if it may serve."""
    if now.state == "failed":
        kind, why = EngineFailedError.kind, has_failed(now)
    elif now.lost and now.state == "resident" and not now.hibernated:
        kind, why = AdmissionClosedError.kind, discarded(now.lost)
    elif why := wrong_weights(now, demanded):
        kind = WrongWeightsError.kind
    else:
        return "", ""
    return kind, f"it serves no request: {why}"


def has_failed(now: OccupationAnswer) -> str:
    return now.admission.reason or "it has failed"


def wrong_weights(now: OccupationAnswer, demanded: str | None) -> str:
    """Return how the weights of an engine differ from the version that a resume demanded; nothing if they do not."""
    if demanded in (None, now.weights_version):
        return ""
    held = f"are of version {now.weights_version!r}" if now.weights_version else "have no version"
    return f"its weights {held}, and a resume demanded {demanded!r}; update or resume it"


class FleetProgress(Model):
    """An operation of the fleet. ``engines`` gives the stage of each: waiting, preparing, prepared, committing, done,
    undone or failed; or silent while it does not answer."""

    operation: OperationName
    operation_id: str
    mode: FleetMode
    stage: Stage
    seconds: float
    engines: dict[str, str]


class FleetStatus(Model):
    """The fleet now: ``state`` is the one of all engines that answer, or mixed; empty without engines."""

    state: str
    engines: list[EngineStatus]
    wanted: list[Wanted]
    demands: list[Demand]
    progress: FleetProgress | None = None

    @classmethod
    def of(cls, engines: list[EngineStatus], record: RecordContent, progress: FleetProgress | None) -> FleetStatus:
        state = common(engine.state for engine in engines if engine.alive)
        wanted, demands = list(record.wanted), list(record.demands)
        return cls(state=state, engines=engines, wanted=wanted, demands=demands, progress=progress)


class FleetEvent(Model):
    """One event of ``watch``.

    ``event`` is ``joined``, ``left``, ``state`` (an engine's state changed), ``silent`` (it gives no answer yet),
    ``dead``, ``back``, ``progress`` (an operation's on one engine), ``operation`` (the fleet's: stage changed),
    ``result`` (it ended), ``reconciled``, or ``error`` (the members cannot be read). ``engine`` is its name, or empty.
    """

    at: float
    event: str
    engine: str = ""
    data: Mapping[str, Any] = Field(default={})


class FleetOccupationAnswer(FleetOccupation):
    """What the engines hold together, and each of them."""

    wanted: tuple[Wanted, ...]
    demands: tuple[Demand, ...]
    progress: FleetProgress | None


class CallRow(Model):
    """What one engine answered. ``status`` is 0 if no answer came, or one that cannot be read."""

    name: str
    url: str
    success: bool
    status: int
    message: str
    body: Any = None


class CallAnswer(Model):
    """What every engine answered to the same call."""

    success: bool
    message: str
    status: Literal["ok", "failed"]
    engines: tuple[CallRow, ...]
