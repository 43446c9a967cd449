"""An operation of the fleet, and the table of its states."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from memsaver_core.contract.errors import LeaseEndedError, TooLateToCancelError
from memsaver_core.contract.requests import Asked, AskedOfFleet, FleetRelease, FleetResize
from memsaver_server.fleet.parts import Part
from memsaver_server.fleet.record import Known, Outcome, Running, Wanted
from memsaver_server.fleet.results import FleetProgress, FleetResult, Origin
from memsaver_server.operation.history import KEPT_S
from memsaver_server.operation.operation import Operation
from memsaver_server.operation.table import Row, Table

#: How an operation ends: ``each`` in mode ``best_effort``; in mode ``all`` it is ``done``, ``aborted`` (nothing was
#: moved) or ``undone`` (some was, and was moved back, or should be).
How = Literal["done", "aborted", "undone", "each"]

#: An operation of a fleet; in mode ``best_effort`` it commits on each engine by itself.
FLEET = Table(
    {
        "queued": "running",
        "asking": "running",
        "preparing": "running",
        "aborting": "running",
        "committing": "running",
        "rolling_back": "running",
        "succeeded": "succeeded",
        "failed": "failed",
        "cancelled": "cancelled",
    },
    Row("queued", "ask", "worker", "asking", "what its engines hold; the locks of their names and GPUs follow"),
    Row("asking", "prepare", "worker", "preparing", "mode all: every engine has answered, the record says so"),
    Row("asking preparing", "abort", "worker", "aborting", "an engine failed, or a caller gave it up"),
    Row("asking preparing", "commit", "worker", "committing", "all are prepared, the record says so; or best_effort"),
    Row("asking committing", "roll_back", "worker", "rolling_back", "an engine failed: what was moved is moved back"),
    Row("asking committing", "done", "worker", "succeeded"),
    Row("queued asking preparing aborting committing rolling_back", "failed", "worker", "failed"),
    Row("asking preparing aborting", "cancelled", "worker", "cancelled", "all engines are as before"),
    Row("queued asking preparing aborting committing rolling_back", "join", "repeat", None, "as for an engine"),
    Row("queued asking preparing aborting cancelled", "cancel", "caller", None, "before engines begin"),
    Row("committing rolling_back succeeded failed", "cancel", "caller", TooLateToCancelError),
    Row("queued asking preparing aborting committing rolling_back", "commit_by_caller", "caller", LeaseEndedError),
)


@dataclass(eq=False, kw_only=True)
class FleetOperation(Operation):
    """Use it in one event loop."""

    origin: Origin
    cause: str  # why the coordinator does it, if it was not just asked to
    wish: Wanted | None  # what the record is to say once it is carried out; None: nothing
    digest: str  # of its request; empty if no caller can name it
    prepare_key: str  # the Idempotency-Key under which engines prepare it: a new one for each attempt
    parts: list[Part] = field(default_factory=list)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)  # too late once it is ``committing``
    how: How = "aborted"  # how it ended; what is not ``done`` yet counts as ``aborted``
    overtaken: bool = False  # by a later call about its engines, or perhaps by an update of their weights
    repeated: bool = False  # it did nothing: the record knew its id
    task: asyncio.Task[FleetResult] | None = None

    @classmethod
    def of(
        cls, asked: AskedOfFleet, operation_id: str = "", client: str = "", origin: Origin = "caller", cause: str = ""
    ) -> FleetOperation:
        named = operation_id or uuid.uuid4().hex[:12]
        until_asked = origin == "turns" or (isinstance(asked, FleetRelease) and asked.wake_on_request)
        operation = cls(
            id=named,
            request=asked,
            client=client,
            table=FLEET,
            origin=origin,
            cause=cause,
            wish=None if isinstance(asked, FleetResize) else Wanted.of(asked, named, client, until_asked),
            digest=asked.digest() if origin == "caller" else "",
            prepare_key=f"{quote(named, safe=':')}-{uuid.uuid4().hex[:8]}",
        )
        operation.start("ask")
        return operation

    @classmethod
    def left(cls, operation_id: str, left: Running, asked: AskedOfFleet) -> FleetOperation:
        """Return the operation that another coordinator has left unfinished."""
        cause = "the coordinator that had begun it is gone"
        operation = cls.of(asked, operation_id, left.wanted.client, cause=cause)
        operation.wish, operation.digest, operation.prepare_key = left.wanted, left.digest, left.key
        return operation

    @property
    def asked(self) -> AskedOfFleet:
        assert isinstance(self.request, AskedOfFleet)
        return self.request

    @property
    def result(self) -> FleetResult | None:
        """What became of every engine; None while it runs, or if it could not be begun."""
        return self.report if isinstance(self.report, FleetResult) else None

    def join(self, request: Asked) -> bool:
        return not self.given_up.is_set() and super().join(request)

    def answers(self, asked: AskedOfFleet) -> bool:
        """Whether a call under its id gets its result: one of the same request, as long as the id is kept and no later
        call was about its engines."""
        kept = self.finished_at is None or self.finished_at > time.time() - KEPT_S
        return kept and not self.overtaken and self.answers_repeats and self.digest == asked.digest()

    async def outcome(self) -> FleetResult:
        """Wait for its end; return its result, or raise why it could not be begun. Its callers may be cancelled."""
        assert self.task is not None
        return await asyncio.shield(self.task)

    def known(self, outcome: Outcome) -> Known:
        """Return what the record keeps of its id."""
        verb = self.request.operation
        resized = self.asked.selected() if verb == "resize" else None
        return Known(digest=self.digest, verb=verb, outcome=outcome, at=time.time(), resized=resized)

    @property
    def phase(self) -> str:
        """The stage that it is in, or an empty string."""
        return "" if self.has_ended else self.state

    @property
    def phase_starts(self) -> tuple[float, ...]:
        return (self.created_at,) if self.phase else ()

    @property
    def can_be_cancelled(self) -> bool:
        return self.how == "aborted" and not self.has_ended and self.table.allows(self.state, "cancel")

    @property
    def engines(self) -> dict[str, str]:
        if self.result is None:
            return {part.member.name: part.shown for part in self.parts}
        rows = self.result.engines
        return {row.name: "done" if row.success else "failed" if row.error else "undone" for row in rows}

    def go(self, event: str) -> None:
        with self.changed:
            self.advance(event)

    def conclude(self, result: FleetResult | None, error: BaseException | None = None) -> None:
        """Record how it ended, and let its callers know. ``error``: it could not be begun."""
        with self.changed:
            self.report, self.error = result, error
            self.finished_at, self.seconds = time.time(), result.seconds if result is not None else self.elapsed_s()
            if result is not None and result.success:
                self.advance("done")
            else:
                given_up = self.given_up.is_set() and self.table.allows(self.state, "cancelled")
                self.advance("cancelled" if given_up else "failed")
        self.answer_callers()

    def described(self) -> dict[str, object]:
        return {"origin": self.origin, "cause": self.cause, "engines": self.engines}

    def audited(self) -> dict[str, object]:
        result = self.result
        return {**self.described(), **({"error": result.message} if result and not result.success else {})}

    def progress_now(self) -> FleetProgress:
        return FleetProgress(
            operation=self.request.operation,
            operation_id=self.id,
            mode=self.asked.fleet_mode,
            stage=self.phase or "ended",
            seconds=self.elapsed_s(),
            engines=self.engines,
        )
