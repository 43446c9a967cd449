"""What a fleet answers. All sizes are bytes, all times seconds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from memsaver_server.fleet.record import Wanted
from memsaver_server.schemas import OccupationAnswer

#: ``all``: every selected engine or none; ``best_effort``: what can be done, and the rest is listed.
Mode = Literal["all", "best_effort"]
#: What a fleet's operation does now.
Stage = Literal["asking", "preparing", "committing", "aborting", "rolling_back", "ended"]


class FleetError(Exception):
    """A fleet's call cannot be carried out; nothing was done."""


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class EngineResult(_Answer):
    """What an operation did on one engine."""

    name: str
    url: str
    success: bool = Field(description="It is as asked. False as well if it was undone together with the others.")
    state: str = Field(description="resident, released, mixed, failed, prepared; or unknown if it does not answer.")
    operation_id: str = Field(default="", description="The engine's own operation, if one was started.")
    seconds: float = 0.0
    released_bytes: int = 0
    resumed_bytes: int = 0
    phase: str = Field(default="", description="Stage of the fleet's operation in which this engine failed.")
    kind: str = Field(default="", description="The error in one word.")
    error: str = Field(default="", description="What failed, on what; empty if this engine did not fail.")
    lost: tuple[str, ...] = Field(default=(), description="Tags whose content must be written again.")


class FleetResult(_Answer):
    """What an operation did on every selected engine."""

    success: bool
    message: str
    operation: Literal["release", "resume"]
    operation_id: str
    mode: Mode
    rolled_back: bool = Field(default=False, description="Memory had been moved on some engines, and was moved back.")
    seconds: float
    engines: list[EngineResult]

    @property
    def failed(self) -> list[EngineResult]:
        """The engines that failed; not those that were undone because others failed."""
        return [engine for engine in self.engines if engine.error]


class EngineStatus(_Answer):
    """One engine now. ``occupation`` is null if it does not answer; ``error`` says why."""

    name: str
    url: str
    model: str
    labels: dict[str, str]
    host: str
    gpus: tuple[str, ...]
    alive: bool
    state: str = Field(description="As in EngineResult.")
    wanted: Literal["released", "resident", "mixed", ""] = Field(description="What the record wants; empty: nothing.")
    error: str = ""
    occupation: OccupationAnswer | None = None


class FleetProgress(_Answer):
    """An operation of the fleet. ``engines`` gives the stage of each: waiting, preparing, prepared, committing, done,
    undone or failed."""

    operation: Literal["release", "resume"]
    operation_id: str
    mode: Mode
    stage: Stage
    seconds: float
    engines: dict[str, str]


class FleetStatus(_Answer):
    """The fleet now: ``state`` is the one of all engines that answer, or mixed; empty without engines."""

    state: str
    engines: list[EngineStatus]
    wanted: list[Wanted]
    progress: FleetProgress | None = None


class FleetEvent(_Answer):
    """One event of ``watch``.

    ``event`` is ``joined``, ``left``, ``state`` (an engine's state changed), ``dead``, ``back``, ``progress`` (an
    operation's on one engine), ``operation`` (the fleet's: stage changed), ``result`` (it ended), ``reconciled``,
    or ``error`` (the members cannot be read). ``engine`` is the engine's name, or empty.
    """

    at: float
    event: str
    engine: str = ""
    data: dict[str, Any] = {}
