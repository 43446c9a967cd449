"""An operation of the fleet in progress."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from memsaver_server.fleet.parts import Part
from memsaver_server.fleet.request import FleetRequest
from memsaver_server.fleet.results import FleetProgress, FleetResult, Stage


@dataclass
class FleetOperation:
    """Use it in one event loop.

    Attributes:
        cancelled: set to give up; too late once the stage is ``committing``.
        began: on the monotonic clock.
        after_failure: it repeats one that has failed here.
    """

    request: FleetRequest
    stage: Stage = "asking"
    parts: list[Part] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    began: float = field(default_factory=time.monotonic)
    task: asyncio.Task[FleetResult] | None = None
    after_failure: bool = False

    @property
    def can_be_cancelled(self) -> bool:
        return self.request.mode == "all" and self.stage in ("asking", "preparing", "aborting")

    def progress(self) -> FleetProgress:
        request = self.request
        return FleetProgress(
            operation=request.operation,
            operation_id=request.operation_id,
            mode=request.mode,
            stage=self.stage,
            seconds=time.monotonic() - self.began,
            engines={part.member.name: part.stage for part in self.parts},
        )
