"""The part of one engine in an operation of the fleet."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from memsaver_core.contract.errors import WrongWeightsError
from memsaver_core.contract.reports import OperationAnswer, PreparedAnswer
from memsaver_core.contract.requests import STATES, AskedOfFleet, OperationName
from memsaver_core.contract.status import OccupationAnswer
from memsaver_server import clock
from memsaver_server.fleet.connection import Connection, EngineFailure
from memsaver_server.fleet.members import Member
from memsaver_server.fleet.record import Prepared, RecordContent
from memsaver_server.fleet.results import EngineResult, EngineStatus, state_of, wrong_weights

#: Why an engine that has done what it was asked is not in that state.
UNDONE = "the operation had ended, and was undone since"


@dataclass
class Part:
    """What is known of one engine while an operation runs."""

    member: Member
    connection: Connection
    stage: str = "waiting"  # as in ``FleetProgress.engines``
    before: OccupationAnswer | None = None  # what the engine held before the operation; None if it did not say
    after: OccupationAnswer | None = None  # likewise after it
    operation_id: str = ""  # its own operation, as soon as that is known
    asked: bool = False  # a prepare was sent, so that the engine may be prepared
    named: tuple[str, ...] = ()  # the tags that it is asked to move, if not those of the request
    tags: tuple[str, ...] = ()  # the tags that its operation moves
    kept: tuple[str, ...] = ()  # the tags that had a backup before it
    answer: OperationAnswer | None = None
    phase: str = ""  # the stage in which it failed
    failure: EngineFailure | None = None
    undo_failure: EngineFailure | None = None
    seconds: float = 0.0
    _lease_ends: float = 0.0
    _began: float = field(default_factory=clock.monotonic)

    @property
    def locks(self) -> set[str]:
        """The names of its locks: one operation at a time has the engine, and each of its GPUs."""
        return {self.member.name, *self.member.gpus}

    @property
    def shown(self) -> str:
        """Its stage, or ``silent`` while its engine does not answer."""
        waits = self.stage not in ("done", "undone", "failed") and self.connection.silent_s
        return "silent" if waits else self.stage

    def fail(self, phase: str, failure: EngineFailure) -> None:
        """Note the first failure."""
        if self.failure is None:
            self.phase, self.failure, self.stage = phase, failure, "failed"

    @contextmanager
    def failing(self, phase: str) -> Iterator[None]:
        """Note a failure of the engine inside."""
        try:
            yield
        except EngineFailure as failure:
            self.fail(phase, failure)

    def prepared(self, answer: PreparedAnswer, lease_ends: float) -> None:
        """Note that it is prepared until ``lease_ends``, on the monotonic clock."""
        self.stage, self.operation_id = "prepared", answer.operation_id
        self.tags = tuple(tag.tag for tag in answer.tags if tag.bytes)
        self.kept = tuple(tag.tag for tag in self.before.tags if tag.backed_up_bytes) if self.before else ()
        self._lease_ends = lease_ends

    def as_prepared(self) -> Prepared:
        """Return what the record keeps of it."""
        about = {name: getattr(self.member, name) for name in ("url", "model", "gpus")}
        return Prepared(**about, operation_id=self.operation_id, tags=self.tags, kept=self.kept)

    def lease_left(self) -> float:
        """Seconds for which it stays prepared at least."""
        return self._lease_ends - clock.monotonic()

    def done(self, answer: OperationAnswer) -> None:
        self.answer, self.stage = answer, "done"
        self.operation_id = answer.operation_id
        self.ended()

    async def perform(self, verb: OperationName, body: Mapping[str, Any], phase: str, key: str | None = None) -> None:
        """Carry out an operation in one call; ``phase`` is that of a failure."""
        try:
            self.done(await self.connection.perform(verb, body, key=key))
        except EngineFailure as failure:
            self.fail(phase, failure)
            await self.look()
            self.ended()

    def check(self, now: OccupationAnswer | None, asked: AskedOfFleet, phase: str, why: str = UNDONE) -> None:
        """Fail in ``phase`` if what the engine holds ``now`` is not as ``asked``: the reason is ``why``, or the version
        of its weights. Does nothing if ``now`` is None."""
        if now is None:
            return
        self.after = now
        state = STATES.get(asked.operation)
        awake = getattr(asked, "hibernate", None) and not now.hibernated
        if now.state == "failed" or awake or (state and unlike(now, state, asked.tags)):
            failure = EngineFailure("changed", why)
        elif wrong := wrong_weights(now, getattr(asked, "weights_version", None)):
            failure = EngineFailure(WrongWeightsError.kind, wrong)
        else:
            return
        self.fail(phase, failure)

    def ended(self) -> None:
        self.seconds = clock.monotonic() - self._began

    async def look(self) -> None:
        try:
            self.after = await self.connection.occupation()
        except EngineFailure as failure:
            self.after = None
            self.undo_failure = self.undo_failure or failure

    def moved(self, verb: OperationName) -> tuple[str, ...]:
        """Return those of its tags that were in the state after ``verb`` when ``look`` read them."""
        rows = self.after.tags if self.after else ()
        return tuple(
            tag.tag
            for tag in rows
            if tag.tag in self.tags and (tag.released_bytes if verb == "release" else tag.resident_bytes)
        )

    def is_stray(self, verb: OperationName) -> bool:
        """Return whether the engine is not as it was before ``verb``, which was given up, or its state is unknown."""
        now, before = self.after, self.before
        if now is None or (now.state == "failed" and (before is None or before.state != "failed")):
            return True
        of_others = (None, before.operation_id if before is not None else None)
        return now.operation_id not in of_others or bool(self.moved(verb))

    @property
    def state(self) -> str:
        if self.after is not None:
            return state_of(self.after)
        return self.answer.state if self.answer is not None and self.stage == "done" else "unknown"

    def lost(self) -> tuple[str, ...]:
        """Return the tags whose content must be written again, as far as it was read."""
        return self.after.lost if self.after else ()

    def status(self, record: RecordContent) -> EngineStatus:
        return EngineStatus.of(self.member, self.before, self.failure, record)

    def result(self, *, undone: bool) -> EngineResult:
        """Return the row of the answer; ``undone``: the operation as a whole was given up."""
        answer = None if undone else self.answer
        failure = self.failure
        return EngineResult(
            name=self.member.name,
            url=self.member.url,
            success=not undone and failure is None,
            state=self.state,
            operation_id=self.operation_id,
            seconds=self.seconds,
            released_bytes=answer.released_bytes if answer else 0,
            resumed_bytes=answer.resumed_bytes if answer else 0,
            phase=self.phase,
            kind=failure.kind if failure else "",
            error=str(failure) if failure else "",
            lost=self.lost(),
        )


def unlike(now: OccupationAnswer, state: str, tags: Collection[str] = ()) -> tuple[str, ...]:
    """Return those of ``tags``, or of all if none is named, of which something is not in this state."""
    asleep = now.hibernated  # then nothing of it is on the device
    return tuple(
        tag.tag
        for tag in now.tags
        if (not tags or tag.tag in tags)
        and (tag.resident_bytes and not asleep if state == "released" else tag.released_bytes or asleep)
    )
