"""An operation of the fleet, and the table of its states."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from memsaver_core.contract.errors import LeaseEndedError, TooLateToCancelError
from memsaver_core.contract.model import common
from memsaver_core.contract.reports import held_by
from memsaver_core.contract.requests import Asked, AskedOfFleet, FleetRelease, FleetResize
from memsaver_server.fleet.connection import Coordinator
from memsaver_server.fleet.parts import Part
from memsaver_server.fleet.record import Known, Outcome, Running, RunningStage, Wanted
from memsaver_server.fleet.results import FleetProgress, FleetResult, Origin, count_of
from memsaver_server.operation.history import KEPT_S
from memsaver_server.operation.operation import Operation
from memsaver_server.operation.table import Row, Table

#: How an operation ends: ``done``, in mode ``best_effort`` on some engines; ``aborted`` (nothing was moved); or
#: ``undone`` (some was, and was moved back, or should be).
How = Literal["done", "aborted", "undone"]
#: Engines of one kind that a message lists; the answer has all.
_LISTED = 8

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
    """Use it in one event loop, which needs no lock."""

    report: FleetResult | None = None  # what became of every engine; None while it runs, or if it could not be begun
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
    task: asyncio.Task[None] | None = None  # that carries it out; None: its caller does

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
            prepare_key=f"{quote(named, safe=':')[:200]}-{uuid.uuid4().hex[:8]}",
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

    def join(self, request: Asked) -> bool:
        return not self.given_up.is_set() and super().join(request)

    def answers(self, asked: AskedOfFleet) -> bool:
        """Whether a repeat under its id gets its result: if that asks for the same, the id is still kept, and no later
        call was about its engines."""
        kept = self.finished_at is None or self.finished_at > time.time() - KEPT_S
        return kept and not self.overtaken and self.answers_repeats and self.digest == asked.digest()

    async def outcome(self) -> FleetResult:
        """Wait for its end; return its result, or raise why it could not be begun. Its callers may be cancelled."""
        await self.ended()
        if self.error is not None:
            raise self.error
        assert self.report is not None
        return self.report

    def known(self, outcome: Outcome) -> Known:
        """Return what the record keeps of its id."""
        verb = self.request.operation
        resized = self.asked.selected() if verb == "resize" else None
        return Known(digest=self.digest, verb=verb, outcome=outcome, at=time.time(), resized=resized)

    def as_running(self, stage: RunningStage) -> Running:
        """Return what the record keeps of it, which is of mode ``all``, until it has ended."""
        assert self.wish is not None
        engines = {part.member.name: part.as_prepared() for part in self.parts}
        sent, key = self.asked.sent(), self.prepare_key
        return Running(stage=stage, wanted=self.wish, sent=sent, key=key, digest=self.digest, engines=engines)

    @property
    def phase(self) -> str:
        """The stage that it is in, or an empty string."""
        return "" if self.has_ended else self.state

    @property
    def phase_starts(self) -> tuple[float, ...]:
        return (self.created_at,) if self.phase else ()

    @property
    def engines(self) -> dict[str, str]:
        if self.report is None:
            return {part.member.name: part.shown for part in self.parts}
        rows = self.report.engines
        return {row.name: "done" if row.success else "failed" if row.error else "undone" for row in rows}

    def conclude(self, result: FleetResult | None, error: BaseException | None = None) -> None:
        """Record how it ended, and let its callers know. ``error``: it could not be begun."""
        self.report, self.error = result, None if error is None else error.with_traceback(None)
        self.finished_at, self.seconds = time.time(), result.seconds if result is not None else self.elapsed_s()
        if result is not None and result.success:
            self.advance("done")
        else:
            given_up = self.given_up.is_set() and self.table.allows(self.state, "cancelled")
            self.advance("cancelled" if given_up else "failed")
        self.answer_callers()

    def described(self) -> dict[str, object]:
        return {"origin": self.origin, "cause": self.cause, "engines": self.engines}

    def summed_up(self, coordinator: Coordinator) -> FleetResult:
        """Return its answer, from its parts."""
        parts, given_up = self.parts, self.how != "done"
        # Engines that are not as before although the operation was given up, or whose state is unknown.
        strays = [part for part in parts if given_up and part.is_stray(self.request.operation)]
        engines = tuple(part.result(undone=given_up) for part in parts)
        holders = {part.before.coordinator for part in parts if part.before is not None} - {"", coordinator.name}
        return FleetResult(
            success=all(engine.success for engine in engines),
            message="".join([self._message(strays, coordinator.prepared_for_s), *map(held_by, sorted(holders))]),
            coordinator=", ".join(sorted(holders)),
            operation=self.request.operation,
            operation_id=self.id,
            state=common(engine.state for engine in engines),
            released_bytes=sum(engine.released_bytes for engine in engines),
            resumed_bytes=sum(engine.resumed_bytes for engine in engines),
            mode=self.asked.fleet_mode,
            rolled_back=self.how == "undone" and not strays,
            seconds=self.elapsed_s(),
            engines=engines,
        )

    def _message(self, strays: Sequence[Part], prepared_for_s: float) -> str:
        """``prepared_for_s``: for so long an engine stays prepared by itself."""
        parts, done = self.parts, f"{self.request.operation}d"
        failed = [part for part in parts if part.failure is not None]
        each = _listed(f"{part.member.name} failed while {part.phase}: {part.failure}" for part in failed)
        but = _listed(map(_stray, strays))
        lost = _listed(f"{' and '.join(part.lost())} of {part.member.name}" for part in parts if part.lost())
        losses = f". Content to be written again: {lost}" if lost else ""
        if self.how == "done":
            all_of = count_of(parts)
            if failed:
                return f"{done} on {len(parts) - len(failed)} of {all_of}; {each}{losses}"
            return f"{done} on {all_of}{losses}"
        cancelled = "it was cancelled" if self.how == "aborted" and self.given_up.is_set() else ""
        reasons = "; ".join(filter(None, [self.cause or cancelled, each]))
        if self.how == "aborted":
            after = "All engines are as before"
            if strays:
                after = f"As before are all but {but}"
            prepared = [part for part in strays if part.phase != "asking"]  # else they were not asked to
            if any(part.after is None or part.after.operation_id for part in prepared):
                after += f". What is prepared there ends with its lease, within {prepared_for_s:g} s"
            return f"nothing was {done}: {reasons}. {after}"
        if strays:
            return f"{reasons}; undone, but not on {but}{losses}"
        return f"{reasons}; what was {done} was undone: all engines are as before{losses}"

    def audited(self) -> dict[str, object]:
        result = self.report
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


def _listed(texts: Iterable[str]) -> str:
    every = list(texts)
    more = [f"and {len(every) - _LISTED} more"] if len(every) > _LISTED else []
    return "; ".join(every[:_LISTED] + more)


def _stray(part: Part) -> str:
    why = f" ({part.undo_failure})" if part.undo_failure is not None else ""
    return f"{part.member.name}, which is {part.state}{why}"
