"""One engine, as the coordinator talks to it: each call has a limit, and a failure is one type."""

from __future__ import annotations

import asyncio
import math
import ssl
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import httpx

from memsaver_core.contract import reports
from memsaver_core.contract.errors import OR_WAIT
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.requests import OperationName
from memsaver_core.contract.status import COORDINATOR_HEADER, OccupationAnswer
from memsaver_server import clock
from memsaver_server.client.aio import AsyncClient
from memsaver_server.client.errors import AnswerError, UnreachableError
from memsaver_server.client.requests import AnswerT, Call, key_header, operation_call, path_of
from memsaver_server.fleet.answers import content_of
from memsaver_server.fleet.members import Member
from memsaver_server.threads import first_of

_T = TypeVar("_T")

#: Into how many short waits the wait for an answer is divided. If the coordinator's own process does not run for a
#: while, only one of them ends early: the engine is not taken for silent.
_LOOKS = 10
#: An engine that does not answer for so long is reported as silent while it is waited for, seconds.
QUIET_S = 1.0


class EngineFailure(Exception):
    """A call to an engine failed.

    Attributes:
        kind: the error in one word, as the engine gave it; ``unreachable``, ``silent`` or ``hung`` if it gave none.
        answered: the engine itself said so. Otherwise it is unknown what the call did.
    """

    def __init__(self, kind: str, message: str, *, answered: bool = False) -> None:
        self.kind = kind
        self.answered = answered
        super().__init__(message)


#: Calls that engines answer at once, in flight at a time.
SHORT_CALLS = 64


@dataclass
class Coordinator:
    """A coordinator, as engines know it, and how it calls them."""

    name: str
    api_key: str | None  # of the engines without ``Member.api_key``
    silence_s: float  # an engine that does not answer for so long counts as silent, seconds
    prepared_for_s: float  # how long an engine stays prepared if this coordinator does not call it, seconds
    verify: ssl.SSLContext | bool  # as for the client; one for all engines, as making one takes longer than a call
    holds: bool = False  # it reconciles: it keeps the engines as they are wanted
    #: Limits how many calls are in flight, of those that engines answer at once.
    turns: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, SHORT_CALLS))


class Connection:
    """The calls to one engine. Every method raises EngineFailure.

    ``body`` has the fields of an operation.
    """

    def __init__(self, member: Member, coordinator: Coordinator) -> None:
        self.member = member
        self._silence_s = coordinator.silence_s
        self._closed = False
        self._unanswered: dict[asyncio.Task[Any], float] = {}  # when it was sent
        self._coordinator = coordinator
        self._client = _Client(
            member.url,
            coordinator.name,
            api_key=member.api_key or coordinator.api_key,
            timeout_s=coordinator.silence_s,
            operation_timeout_s=None,
            attempts=2,
            verify=coordinator.verify,
        )

    @property
    def silent_s(self) -> float:
        """For how long a call that engines answer at once has had no answer; 0 up to ``QUIET_S``."""
        waits_s = clock.monotonic() - min(self._unanswered.values(), default=math.inf)
        return waits_s if waits_s > QUIET_S else 0.0

    async def occupation(self) -> OccupationAnswer:
        headers = {COORDINATOR_HEADER: self._coordinator.name} if self._coordinator.holds else {}
        call = Call("GET", "/memory_occupation", headers=headers)
        now = await self._ask(partial(self._client.call, _Occupation, call))
        if now.engines is not None:
            what = f"{self.member.url} is a coordinator of {len(now.engines)} engines: list those engines instead"
            raise EngineFailure("is_coordinator", what, answered=True)
        return now

    async def operation(self, operation_id: str) -> reports.OperationStatusAnswer:
        return await self._ask(partial(self._client.operation, operation_id))

    async def plan(self, verb: OperationName, tags: Sequence[str]) -> reports.PlanAnswer:
        call = operation_call(verb, tags, {}, "dry_run")
        return await self._ask(partial(self._client.call, reports.PlanAnswer, call))

    async def prepare(
        self, verb: OperationName, body: Mapping[str, Any], key: str, limit_s: float
    ) -> reports.PreparedAnswer:
        """Prepare what ``body`` asks for, or renew its lease: ``key`` proves that it is ours."""
        return await self._attend(reports.PreparedAnswer, _operation(verb, body, key), limit_s)

    async def find(self, verb: OperationName, body: Mapping[str, Any], key: str) -> str:
        """Return the id of an operation whose answer has not come: a repeat under its ``key`` joins it."""
        return await self._ask(partial(self._find, _operation(verb, body, key)))

    async def commit(self, operation_id: str, key: str) -> reports.OperationAnswer:
        """Carry out an operation that was prepared under ``key``; without a time limit."""
        call = Call("POST", f"/operations/{operation_id}/commit", headers=key_header(key), long=True)
        return await self._attend(reports.OperationAnswer, call, None, operation_id)

    async def abort(self, operation_id: str, key: str) -> None:
        """Undo what was prepared under ``key``. Idempotent."""
        await self._ask(partial(self._client.abort, operation_id, key=key))

    async def perform(
        self, verb: OperationName, body: Mapping[str, Any], *, key: str | None = None, limit_s: float | None = None
    ) -> reports.OperationAnswer:
        """Release, resume or resize in one call. Calls with the same Idempotency-Key ``key`` act once."""
        return await self._attend(reports.OperationAnswer, _operation(verb, body, key), limit_s)

    async def close(self) -> None:
        self._closed = True
        await self._client.close()

    async def _ask(self, send: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Return the answer of a call that the engine answers at once."""
        answer: asyncio.Task[_T] | None = None
        try:
            # The time that a call waits for its turn does not count, and silent engines do not keep their turn.
            async with self._coordinator.turns:
                answer = asyncio.create_task(send())
                self._unanswered[answer] = clock.monotonic()
                await self._came(answer, 1)
            if not await self._came(answer, _LOOKS - 1):
                raise EngineFailure("silent", f"{self.member.url} gave no answer for {self._silence_s:g} s")
            return self._result(answer)
        finally:
            if answer is not None:
                del self._unanswered[answer]
                answer.cancel()
                answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # which nobody logs

    async def _came(self, answer: asyncio.Future[Any], looks: int = _LOOKS) -> bool:
        """Whether ``answer`` comes before the engine counts as silent."""
        for _ in range(looks):
            if not answer.done():
                # Not wait_for, which before Python 3.12 may lose a cancellation.
                await asyncio.wait({answer}, timeout=self._silence_s / _LOOKS)
        return answer.done()

    def _result(self, answer: asyncio.Future[_T]) -> _T:
        try:
            return answer.result()
        except AnswerError as error:
            if httpx.codes.is_success(error.status):  # it did what was asked, or another service answered
                raise EngineFailure("unreadable", str(error)) from error
            kind = error.kind or f"http_{error.status}"
            said = str(error).replace(OR_WAIT, "")
            answered = bool(error.kind) or error.status < 500  # else a gateway before the engine gave up
            raise EngineFailure(kind, f"{said}{key_advice(error.status)}", answered=answered) from error
        except UnreachableError as error:
            raise EngineFailure("unreachable", str(error)) from error
        except Exception as error:  # what an address answers may be anything, and must not fail other engines
            if self._closed:
                raise EngineFailure("left", f"{self.member.url} is no member of the fleet any more") from error
            what = f"gave an answer that cannot be read ({type(error).__name__}: {str(error)[:200]})"
            raise EngineFailure("unreadable", f"{self.member.url} {what}") from error

    async def _attend(self, model: type[AnswerT], call: Call, limit_s: float | None, operation_id: str = "") -> AnswerT:
        """Return the answer of a call that takes long; meanwhile check that the engine works on it, on the operation of
        this id if it is known. The call may be sent twice: what it asks for is done once."""
        send = partial(self._client.call, model, call)
        async with first_of(send(), self._until_worked(call, limit_s, operation_id)) as (answer, worked):
            if not answer.done():
                await worked
            return self._result(answer) if await self._came(answer) else await self._ask(send)  # the answer may be lost

    async def _until_worked(self, call: Call, limit_s: float | None, operation_id: str) -> None:
        """Return once the engine says that its operation has ended, or is prepared. Raises if the engine is silent, or
        takes longer than ``limit_s``; its wait for an update of weights, which it limits itself, does not count."""
        probe_s, began = self._silence_s / 2, clock.monotonic()
        await asyncio.sleep(probe_s)
        operation_id = operation_id or await self._ask(partial(self._find, call))
        while (now := await self.operation(operation_id)).status in ("queued", "running"):
            if now.phase == Phase.WAIT_FOR_WEIGHTS:
                began = clock.monotonic()
            elif limit_s is not None and clock.monotonic() >= began + limit_s:
                late = f"is not done with its {now.operation} after {limit_s:g} s"
                raise EngineFailure("hung", f"{self.member.url} {late}: that is in phase {now.phase or 'queued'!r}")
            await asyncio.sleep(probe_s)

    async def _find(self, call: Call) -> str:
        """Return the id of the operation of a call that is in progress, or has ended: a repeat joins it."""
        again = replace(call, body={**(call.body or {}), "async": True})
        return (await self._client.call(reports.AcceptedAnswer, again)).operation_id


def key_advice(status: int) -> str:
    """Return what to do about an engine's answer of this status, if that is about the coordinator's key."""
    where = "in the list of members, else that of MEMSAVER_ENGINE_API_KEY, else that of MEMSAVER_API_KEY"
    return f"; the coordinator's key for an engine is its api_key {where}" if status in (401, 403) else ""


class _Occupation(OccupationAnswer):
    engines: tuple[Any, ...] | None = None  # of a coordinator


class _Client(AsyncClient):
    call = AsyncClient._ask

    def __init__(self, url: str, name: str, **options: Any) -> None:
        super().__init__(url, **options)
        self._http.headers.update({"User-Agent": name, "Accept-Encoding": "identity"})

    async def _request(self, call: Call) -> httpx.Response:
        async with self._http.stream(**self._target.options(call)) as answer:
            content = await content_of(answer, None)  # the calls have limits
        return httpx.Response(answer.status_code, content=content, request=answer.request)


def _operation(verb: OperationName, body: Mapping[str, Any], key: str | None = None) -> Call:
    headers = {"Idempotency-Key": key or uuid.uuid4().hex}
    return Call("POST", path_of(verb), body, headers, long=True)
