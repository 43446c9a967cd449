"""What the routes are mounted on: one engine, or a fleet of them.

A route turns the body of its dialect into a request of the contract, and the controller's answer into an answer of its
dialect. The controller decides what a request does, and to how many engines.
"""

from __future__ import annotations

import asyncio
import platform
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, Literal, Protocol, TypeVar

from memsaver_core.contract import reports
from memsaver_core.contract.errors import MemsaverError
from memsaver_core.contract.model import Model
from memsaver_core.contract.requests import Asked, DrainMode, Fields, Release, Resume, Verb
from memsaver_core.contract.status import HealthAnswer, OccupationAnswer
from memsaver_server.metrics import CallerFigures
from memsaver_server.operation.history import History
from memsaver_server.operation.operation import Operation
from memsaver_server.operation.queue import OperationQueue

#: Poll interval of a stream of events, seconds.
TICK_S = 0.1


def kind_of(error: BaseException | None) -> str:
    return getattr(error, "kind", "internal_error")


@dataclass(frozen=True)
class Answer:
    body: dict[str, Any]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, answer: Model, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
        """Return the answer with the fields of a model, ``success`` and ``message`` first."""
        body = answer.model_dump(mode="json", exclude={"ignored"})
        if body.get("coordinator") == "" and isinstance(answer, reports.OperationAnswer):
            del body["coordinator"]
        first = {name: body.pop(name) for name in ("success", "message") if name in body}
        return cls(first | body, status, headers or {})

    @classmethod
    def message(cls, text: str) -> Answer:
        return cls.of(reports.MessageAnswer(message=text))

    @classmethod
    def error(cls, status: int, kind: str, message: str, retry_after_s: int | None = None, **details: Any) -> Answer:
        """Return the answer that reports an error of ``kind``; ``details`` are its figures and names."""
        about = {"type": kind, "message": message, **details}
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        if retry_after_s is not None:
            headers["Retry-After"] = str(retry_after_s)
        return cls({"success": False, "message": message, "error": about}, status, headers)

    def of_operation(self, **about: Any) -> Answer:
        """Return this error as an operation's answer: its status is in the body, as GET /operations/ID has 200."""
        error = {**self.body["error"], "status": self.status}
        return replace(self, body={**self.body, "error": error, **about})

    @classmethod
    def failure(cls, error: BaseException) -> Answer:
        """Return the answer that reports ``error``. An error that is not memsaver's has status 500."""
        if not isinstance(error, MemsaverError):
            return cls.error(500, "internal_error", f"{type(error).__name__}: {error}")
        return cls.error(error.status, error.kind, str(error), error.retry_after_s, **error.details())


@dataclass(frozen=True)
class EngineState:
    """One engine as status calls of dialects show it."""

    name: str
    url: str
    state: str
    asleep: bool  # accepts no requests because memory is released or scheduling is paused
    released: tuple[str, ...]
    tags: frozenset[str]


@dataclass(frozen=True, eq=False)
class Models:
    """The pydantic models of the requests to a kind of controller, and of its answers.

    Attributes:
        several: it controls many engines, and answers list them.
        selected: the fields by which a call selects engines.
        failures: descriptions of error statuses that only this kind has, by status.
    """

    release: type[Release] = Release
    resume: type[Resume] = Resume
    selected: type[Fields] = Fields
    done: Any = reports.OperationAnswer | reports.PlanAnswer | reports.PreparedAnswer
    message: type[Model] = reports.MessageAnswer
    written: type[Model] = reports.WrittenAnswer
    occupation: type[Model] = OccupationAnswer
    operation: type[Model] = reports.OperationStatusAnswer
    operations: type[Model] = reports.OperationsAnswer
    generates: type[Model] = HealthAnswer
    several: bool = False
    failures: Mapping[int, str] = field(default_factory=dict)

    def asked(self, verb: Verb) -> type[Asked]:
        return self.release if verb == "release" else self.resume


OperationT = TypeVar("OperationT", bound=Operation)
#: What a controller can do beside what every controller can; decides which routes there are.
Capability = Literal["generate", "update", "models"]


class Controller(Protocol[OperationT]):
    """Use it in one event loop, except ``close``. Methods raise errors of the contract."""

    models: Models
    operations: OperationQueue | History[OperationT]  # the remembered ones
    closing: threading.Event  # set by ``close``: streams end
    capabilities: frozenset[Capability]
    callers: CallerFigures

    async def start(self) -> None: ...

    def close(self) -> None:
        """End the streams and threads that would keep a server from stopping. Operations in flight continue."""

    async def end(self) -> None:
        """End what ``start`` began."""

    # -- operations ----------------------------------------------------------------------------------------------

    async def submit(self, asked: Asked, *, client: str, key: str | None) -> OperationT:
        """Start an operation, or join an equal one; ``key`` is the caller's Idempotency-Key."""

    async def attend(self, operation: OperationT, *, prepared: bool) -> None:
        """Wait until an operation has ended, or is ``prepared`` if its caller asked for that. Raises PhaseTimeoutError
        if it stalls (it continues), GroupFailedError if a rank was lost."""

    def answer(self, operation: OperationT) -> Answer:
        """Return the answer to the callers of an operation that has ended, or is prepared."""

    def describe(self, operation: OperationT) -> dict[str, Any]:
        """Return an operation in any status, as JSON."""
        status = reports.OperationStatusAnswer(
            operation_id=operation.id,
            operation=operation.request.operation,
            status=operation.status,
            phase=operation.phase,
            stalled=operation.stall(),
            tags=operation.request.tags or None,
            client=operation.client,
            callers=operation.callers,
            created_at=operation.created_at,
            started_at=operation.started_at,
            finished_at=operation.finished_at,
            seconds=operation.elapsed_s(),
            progress=operation.copies(),
            phases=operation.phases,
            answer=None,
        )
        answer = self.answer(operation).body if operation.has_ended else None
        return {**status.model_dump(mode="json"), "answer": answer, **operation.described()}

    async def commit(self, operation: OperationT, key: str | None = None) -> None:
        """Carry out what is prepared; wait for its end. Raises ConflictError if it was prepared under another
        Idempotency-Key than ``key``."""

    async def cancel(self, operation: OperationT, by: str, key: str | None = None, *, force: bool = False) -> None:
        """Give up an operation that moves no memory yet; wait for its end. Raises as ``commit``, unless ``force``."""

    async def events(self, operation: OperationT) -> AsyncIterator[tuple[str, Any]]:
        """Yield the events of an operation, the last one ``done``."""
        sent = 0  # phases
        current = stalled_in = ""
        last_progress: reports.ProgressAnswer | None = None
        stages: dict[str, str] = {}  # of engines
        ended = operation.ended()
        while not self.closing.is_set():
            done = operation.done.done()
            phases = operation.phases
            for phase in phases[sent:]:
                yield "phase_done", phase.model_dump(mode="json")
            sent = len(phases)
            if operation.phase and operation.phase != current:
                current = operation.phase
                yield "phase", {"name": current}
            now = operation.copies()
            if now is not None and now != last_progress:
                last_progress = now
                yield "progress", now.model_dump()
            stall = operation.stall()
            if stall is not None and stall.phase != stalled_in:
                stalled_in = stall.phase
                yield "stalled", stall.model_dump()
            for name, stage in operation.engines.items():
                if stages.get(name) != stage:
                    stages[name] = stage
                    yield "engine", {"name": name, "stage": stage}
            if done:
                yield "done", self.answer(operation).body
                return
            await asyncio.wait({ended}, timeout=TICK_S)

    async def plan(self, asked: Asked) -> Answer:
        """Return what an operation would do."""

    # -- state ---------------------------------------------------------------------------------------------------

    async def occupation(self, coordinator: str = "") -> dict[str, Any]:
        """Return what is held now, as JSON. If a ``coordinator`` asks, it holds the engine from then on."""

    async def rows(self, selected: Fields | None) -> Sequence[EngineState]:
        """Return the selected engines; None: all, if there are any."""

    def health(self, *, ready: bool) -> HealthAnswer:
        """Return whether the engine, or the fleet, is alive; with ``ready`` whether it accepts requests."""

    async def generates(self) -> Answer:
        """Return whether tokens can be generated now."""

    def version(self) -> dict[str, str]:
        return {"version": metadata.version("memsaver"), "python": platform.python_version()}

    def scrape(self) -> bytes:
        """Return the metrics in Prometheus' format."""

    # -- the dashboard -------------------------------------------------------------------------------------------

    def readings(self) -> Iterable[dict[str, Any]]:
        """Return device memory in use over the last minutes."""

    async def shown(self) -> dict[str, Any]:
        """Return what is held now, and when it was read, with the devices to draw."""

    # -- calls of the engine -------------------------------------------------------------------------------------

    async def pause(
        self, selected: Fields, mode: DrainMode, timeout_s: float | None, *, asleep: bool = False
    ) -> Answer:
        """Stop generating; with ``asleep`` status calls report a sleep."""

    async def continue_(self, selected: Fields, *, scheduling: bool = False) -> Answer:
        """Generate again, at once or when all memory is resident; ``scheduling``: after a pause that is ``asleep``."""

    async def kv_cache(self) -> Answer:
        """Return the size of the KV cache. Raises UnsupportedError if the engine cannot change it."""

    async def flush(self, selected: Fields) -> Answer:
        """Forget cached prefixes."""

    async def written(self, selected: Fields, tags: Sequence[str], version: str | None) -> Answer:
        """Note that the caller has written the content of ``tags`` (none: all that is lost), weights of ``version``."""

    async def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Serve one request for tokens; only with the capability."""
        raise AssertionError("without the capability there is no such route")

    async def update(self, selected: Fields, asked: Fields, source: Literal["disk", "tensor"]) -> Answer:
        """Overwrite the weights with those of a checkpoint folder, or some with those in a body."""


def accepted(operation: Operation) -> Answer:
    """Return the answer to a caller who does not wait."""
    verb, location = operation.request.operation, f"/operations/{operation.id}"
    now = f"has ended: {operation.status}" if operation.has_ended else "continues in the background"
    answer = reports.AcceptedAnswer(
        message=f"{verb} {operation.id} {now}",
        operation=verb,
        operation_id=operation.id,
        status=operation.status,
        location=location,
    )
    return Answer.of(answer, 202, {"Location": location})
