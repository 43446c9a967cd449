"""The operations of a fleet that its callers and the turns have asked for."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memsaver_core import MemsaverError
from memsaver_server.fleet.fleet import AsyncFleet
from memsaver_server.fleet.members import MembershipError
from memsaver_server.fleet.record import RecordError
from memsaver_server.fleet.request import Verb
from memsaver_server.fleet.results import FleetError, FleetProgress, FleetResult, Mode
from memsaver_server.fleet.selectors import Selector
from memsaver_server.fleet.serve.observer import Observer
from memsaver_server.fleet.turns.seat import TURN_PREFIX
from memsaver_server.fleet.turns.turns import Turns
from memsaver_server.http.errors import BadRequestError

#: Who asks for the operations of the turns.
TURNS = "turns"


class FleetConflictError(MemsaverError):
    """An operation of the fleet in progress would undo this one."""

    kind = "conflict"
    status = 409
    retry_after_s = 1


class KeyReusedError(MemsaverError):
    """The id or Idempotency-Key belongs to another request."""

    kind = "idempotency_key_reused"
    status = 422


class TooLateError(MemsaverError):
    """The operation moves memory already, or has ended."""

    kind = "too_late"
    status = 409


class FleetUnknownError(MemsaverError):
    """The members or the record cannot be read or written. Nothing was done."""

    kind = "fleet_unknown"
    status = 503
    retry_after_s = 1


@dataclass(frozen=True)
class Asked:
    """What an operation does."""

    verb: Verb
    selector: Selector
    tags: tuple[str, ...] | None
    mode: Mode
    timeout_s: float
    options: Mapping[str, Any]
    wake_on_request: bool = False


@dataclass(eq=False)
class ServedOperation:
    """One operation. ``id`` is the coordinator's, ``key`` the caller's name of it, or its id."""

    id: str
    key: str
    asked: Asked
    client: str
    created_at: float = field(default_factory=time.time)
    finished_at: float | None = None
    callers: int = 1
    cancelled: bool = False
    task: asyncio.Task[FleetResult] = field(init=False)

    @property
    def has_ended(self) -> bool:
        return self.task.done()

    @property
    def result(self) -> FleetResult | None:
        """What became of every engine; None while it runs, or if it could not be begun."""
        return self.task.result() if self.task.done() and self.task.exception() is None else None

    @property
    def status(self) -> str:
        if not self.has_ended:
            return "running"
        if self.result is not None and self.result.success:
            return "succeeded"
        return "cancelled" if self.cancelled else "failed"

    async def ended(self) -> None:
        """Wait for its end. A caller that goes away cancels nothing."""
        await asyncio.wait({self.task})


class Operations:
    """Use it in one event loop. ``turns`` is set once there are turns: no request is sent to engines that move."""

    def __init__(self, fleet: AsyncFleet, observer: Observer, history: int, drain_timeout_s: float) -> None:
        self._fleet = fleet
        self._observer = observer
        self._history = history
        self._drain_timeout_s = drain_timeout_s
        self._known: OrderedDict[str, ServedOperation] = OrderedDict()
        self.turns: Turns | None = None
        #: How operations ended, by verb and outcome.
        self.counts: dict[tuple[str, str], int] = {}

    def start(self, asked: Asked, *, client: str, key: str | None, wait: bool) -> ServedOperation:
        """Begin an operation, or join an equal one that runs.

        Args:
            key: a repeat with the same key is the same operation, also when it has ended, unless it failed.

        Raises:
            KeyReusedError: the key belongs to another request.
            FleetConflictError: the opposite is in progress on some of the engines, and ``wait`` is not given.
        """
        known = self._find_equal(asked, key)
        if known is not None:
            known.callers += 1
            return known
        running = next((each for each in self._running() if self._opposes(asked, each)), None)
        if running is not None and not wait:
            raise FleetConflictError(
                f"cannot {asked.verb}: {running.asked.verb} {running.key} of the fleet is in progress on some of these "
                'engines. Try again when it is done, or send "wait": true'
            )
        name = key or uuid.uuid4().hex[:12]
        operation = ServedOperation(f"{TURN_PREFIX}{name}" if asked.wake_on_request else name, name, asked, client)
        operation.task = asyncio.get_running_loop().create_task(self._perform(operation))
        self._known[name] = operation
        return operation

    def get(self, key: str) -> ServedOperation | None:
        return self._known.get(key)

    def recent(self) -> list[ServedOperation]:
        """Return all that are remembered, newest first."""
        return list(reversed(self._known.values()))

    def progress(self, operation: ServedOperation) -> FleetProgress | None:
        """Return how far a running operation is."""
        now = [each for each in self._fleet.operations() if each.operation_id == operation.id]
        return next((each for each in now if isinstance(each, FleetProgress)), None)

    async def cancel(self, operation: ServedOperation) -> None:
        """Give an operation up, and wait for its end. Idempotent.

        Raises:
            TooLateError: it moves memory already, or has ended otherwise.
        """
        if operation.has_ended and operation.cancelled:
            return
        try:
            await self._fleet.cancel(operation.id)
        except FleetError as error:
            raise TooLateError(str(error)) from None
        operation.cancelled = True
        await operation.ended()

    # -- turns.Mover ---------------------------------------------------------------------------------------------------

    async def release(self, names: Sequence[str]) -> FleetResult:
        return await self._move("release", names)

    async def resume(self, names: Sequence[str]) -> FleetResult:
        return await self._move("resume", names)

    async def look(self, names: Sequence[str]) -> None:
        await self._observer.look(names)

    async def _move(self, verb: Verb, names: Sequence[str]) -> FleetResult:
        selector = Selector(names=tuple(names))
        asked = Asked(verb, selector, None, "all", self._drain_timeout_s, {}, wake_on_request=True)
        operation = self.start(asked, client=TURNS, key=None, wait=True)
        return await asyncio.shield(operation.task)

    # -- internals -----------------------------------------------------------------------------------------------------

    async def _perform(self, operation: ServedOperation) -> FleetResult:
        try:
            result = await self._aside(operation)
            outcome = "success" if result.success else next((each.kind for each in result.failed), "cancelled")
        except Exception as error:
            outcome = getattr(error, "kind", "internal_error")
            raise
        finally:
            operation.finished_at = time.time()
            self._forget()
            self.counts[operation.asked.verb, outcome] = self.counts.get((operation.asked.verb, outcome), 0) + 1
        return result

    async def _aside(self, operation: ServedOperation) -> FleetResult:
        if self.turns is None or operation.client == TURNS:  # turns have set their engines aside
            return await self._call(operation)
        selector = operation.asked.selector
        names = [name for name, member in self._observer.members.items() if selector.may_match(member)]
        async with self.turns.set_aside(names):
            try:
                return await self._call(operation)
            finally:
                await self._observer.look(names)

    async def _call(self, operation: ServedOperation) -> FleetResult:
        asked = operation.asked
        run = self._fleet.release if asked.verb == "release" else self._fleet.resume
        try:
            return await run(
                asked.selector,
                tags=asked.tags,
                mode=asked.mode,
                timeout_s=asked.timeout_s,
                operation_id=operation.id,
                **{key: value for key, value in asked.options.items() if value is not None},
            )
        except FleetError as error:
            raise BadRequestError(str(error)) from None
        except (MembershipError, RecordError) as error:
            raise FleetUnknownError(str(error)) from None

    def _running(self) -> list[ServedOperation]:
        return [each for each in self._known.values() if not each.has_ended]

    def _find_equal(self, asked: Asked, key: str | None) -> ServedOperation | None:
        if key is None:
            running = [each for each in self._running() if each.asked == asked and each.client != TURNS]
            return running[-1] if running and running[-1] is self._running()[-1] else None
        known = self._known.get(key)
        if known is not None and known.asked != asked:
            raise KeyReusedError(f"{key!r} belongs to a different {known.asked.verb}; use a new one for a new request")
        if known is not None and known.status == "failed":
            del self._known[key]
            return None
        return known

    def _opposes(self, asked: Asked, running: ServedOperation) -> bool:
        other, members = running.asked, self._observer.members.values()
        both = any(asked.selector.may_match(each) and other.selector.may_match(each) for each in members)
        return asked.verb != other.verb and both and running.client != TURNS  # those are waited for

    def _forget(self) -> None:
        ended = [key for key, each in self._known.items() if each.finished_at is not None]
        for key in ended[: max(0, len(ended) - self._history)]:
            del self._known[key]
