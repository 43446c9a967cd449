"""Many engines at once: released together or not at all, and brought back together.

``Fleet`` and ``AsyncFleet`` coordinate the engines of a membership (a list, DNS, Ray) through the engines' own HTTP
interface. They need httpx and pydantic, but neither torch nor FastAPI.
"""

from __future__ import annotations

from memsaver_core.contract.requests import FleetMode, Selector
from memsaver_server.fleet.fleet import AsyncFleet
from memsaver_server.fleet.members import Member, Membership, MembershipError, StaticMembership
from memsaver_server.fleet.record import FileRecord, MemoryRecord, Record, RecordContent, RecordError, Running, Wanted
from memsaver_server.fleet.results import (
    EngineResult,
    EngineStatus,
    FleetError,
    FleetEvent,
    FleetProgress,
    FleetResult,
    FleetStatus,
)
from memsaver_server.fleet.sources import membership_of
from memsaver_server.fleet.sync import Fleet

__all__ = [
    "AsyncFleet",
    "EngineResult",
    "EngineStatus",
    "FileRecord",
    "Fleet",
    "FleetError",
    "FleetEvent",
    "FleetMode",
    "FleetProgress",
    "FleetResult",
    "FleetStatus",
    "Member",
    "Membership",
    "MembershipError",
    "MemoryRecord",
    "Record",
    "RecordContent",
    "RecordError",
    "Running",
    "Selector",
    "StaticMembership",
    "Wanted",
    "membership_of",
]
