"""What the routes share: the occupation, the meter, the metrics, and how an operation becomes an answer."""

from __future__ import annotations

import asyncio
import threading

from fastapi import Request
from fastapi.responses import JSONResponse

from memsaver_server import audit, tracing
from memsaver_server.device_monitor import DeviceReadings
from memsaver_server.engine import Engine, memory_of
from memsaver_server.http.auth import caller
from memsaver_server.http.errors import problem_of
from memsaver_server.http.fairness import Turns
from memsaver_server.http.request_signing import SeenNonces
from memsaver_server.http.serializers import accepted_answer, operation_answer
from memsaver_server.lifecycle import Occupation
from memsaver_server.metrics import Metrics
from memsaver_server.operation_queue import (
    Operation,
    OperationRequest,
    PhaseTimeoutError,
    ReleaseRequest,
    ResumeRequest,
    ServerEndsError,
)
from memsaver_server.schemas import ReleaseFields, ResumeFields
from memsaver_server.settings import Settings

#: How often those who wait look whether the operation is stuck, seconds, at most.
WATCH_S = 1.0


class Service:
    """One engine, served."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.readings = DeviceReadings(memory=memory_of(engine))
        self.metrics = Metrics(self.readings)
        self.occupation = Occupation(engine, settings, self._record)
        self.metrics.watch(self.occupation)
        self.nonces = SeenNonces()
        self.turns = Turns()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self.closing = threading.Event()

    def close(self) -> None:
        """End what would keep a server from stopping: streams and threads. Operations in flight go on."""
        self.closing.set()
        self.readings.stop()
        self.occupation.operations.close()

    async def release(self, request: Request, fields: ReleaseFields) -> Operation:
        """Start a release, or join the one in flight; wait for its end unless the caller wants to go on.

        Raises:
            As Occupation.release, and PhaseTimeoutError.
        """
        timeout_s = self.settings.drain_timeout_s if fields.timeout_s is None else fields.timeout_s
        asked = ReleaseRequest(
            tags=_normal(fields.tags),
            timeout_s=timeout_s,
            mode=fields.mode,
            restore=tuple(sorted(fields.restore.items())),
            at_least_bytes=fields.at_least_bytes,
            trim=fields.trim,
            hibernate=fields.hibernate,
        )
        return await self._run(request, asked, wait=fields.wait, run_async=fields.run_async)

    async def resume(self, request: Request, fields: ResumeFields) -> Operation:
        """As release, the other way."""
        asked = ResumeRequest(tags=_normal(fields.tags), wait_for_memory_s=fields.wait_for_memory_s)
        return await self._run(request, asked, wait=fields.wait, run_async=fields.run_async)

    async def _run(self, request: Request, asked: OperationRequest, *, wait: bool, run_async: bool) -> Operation:
        key = request.headers.get("idempotency-key")
        try:
            if isinstance(asked, ReleaseRequest):
                operation = self.occupation.release(asked, wait=wait, key=key, client=caller(request))
            else:
                operation = self.occupation.resume(asked, wait=wait, key=key, client=caller(request))
        except Exception as error:
            self.metrics.count(asked.operation, problem_of(error).kind)
            raise
        self._watch(operation)
        if not run_async:
            await self._finished(operation)
        return operation

    def _watch(self, operation: Operation) -> None:
        """Have the log told where ``operation`` is stuck, also where nobody waits for it."""
        if operation.id in self._watches or operation.done.done():
            return
        watch = asyncio.get_running_loop().create_task(operation.watch(self._look_every_s))
        self._watches[operation.id] = watch
        watch.add_done_callback(lambda _: self._watches.pop(operation.id))

    async def _finished(self, operation: Operation) -> None:
        """Wait until ``operation`` has ended, or whatever is in work now is stuck.

        Raises:
            PhaseTimeoutError: a phase has made no progress for too long. The operation goes on.
            ServerEndsError: the server ends first.
        """
        ended = operation.ending()
        while not ended.done():
            try:
                await asyncio.wait({ended}, timeout=self._look_every_s)
            except asyncio.CancelledError:
                if self.closing.is_set():
                    raise ServerEndsError(operation) from None
                raise
            running = self.occupation.operations.running
            stall = running.stall() if running is not None and not ended.done() else None
            if running is not None and stall is not None:
                raise PhaseTimeoutError(running, stall)

    @property
    def _look_every_s(self) -> float:
        return min(WATCH_S, self.settings.phase_timeout_s / 4)

    def _record(self, operation: Operation) -> None:
        outcome = "success" if operation.error is None else problem_of(operation.error).kind
        self.metrics.record(operation, outcome)
        audit.record(operation, outcome)
        tracing.record(operation, outcome)
        if operation.phases:
            self.readings.note(operation.phases[-1].devices)


def answer(operation: Operation, *, run_async: bool = False) -> JSONResponse:
    """Return the answer to the caller of ``operation``: its result, or its address for one that asked to go on."""
    if run_async:
        accepted = accepted_answer(operation)
        return JSONResponse(accepted, 202, headers={"Location": accepted["location"]})
    if operation.error is not None:
        problem = problem_of(operation.error)
        return JSONResponse(operation_answer(operation), problem.status, headers=problem.headers)
    return JSONResponse(operation_answer(operation))


def _normal(tags: list[str] | None) -> tuple[str, ...] | None:
    """An empty list means all, and neither order nor repetition counts."""
    return tuple(sorted(set(tags))) if tags else None
