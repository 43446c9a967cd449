"""The JSON that a fleet answers. All sizes are bytes, all times seconds."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from memsaver_server.fleet.record import Wanted
from memsaver_server.fleet.results import EngineResult, FleetProgress, Mode
from memsaver_server.schemas import OccupationAnswer, OperationAnswer, OperationStatusAnswer


class FleetOperationAnswer(OperationAnswer):
    """What a release or a resume did on every engine. Tags, phases and devices are in the engines' own operations."""

    mode: Mode
    rolled_back: bool
    engines: list[EngineResult]


class EngineRow(BaseModel):
    """One engine now."""

    name: str
    url: str
    model: str
    labels: dict[str, str]
    host: str
    gpus: list[str]
    alive: bool
    state: str
    wanted: str
    error: str
    resident_bytes: int
    released_bytes: int
    requests: int = Field(description="In flight through this coordinator.")


class FleetOccupationAnswer(OccupationAnswer):
    """What the engines hold together, and each of them."""

    engines: list[EngineRow]
    wanted: list[Wanted]
    progress: FleetProgress | None


class CallRow(BaseModel):
    """What one engine answered. ``status`` is 0 if it did not."""

    name: str
    url: str
    success: bool
    status: int
    message: str
    body: Any = None


class CallAnswer(BaseModel):
    """What every engine answered to the same call."""

    success: bool
    message: str
    status: Literal["ok", "failed"]
    engines: list[CallRow]


class FleetOperationStatusAnswer(OperationStatusAnswer):
    """An operation of the fleet in any status; ``phase`` is its stage, ``engines`` that of each engine."""

    answer: FleetOperationAnswer | dict[str, Any] | None  # type: ignore[assignment]
    engines: dict[str, str]


class FleetOperationsAnswer(BaseModel):
    operations: list[FleetOperationStatusAnswer]
