"""The state behind the routes: the lifecycle, the device monitor and the metrics, and how operations are awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse

from memsaver_core import MemsaverError
from memsaver_core.options import ReleaseOptions, ResumeOptions
from memsaver_server import tracing
from memsaver_server.audit import AuditLog
from memsaver_server.device_monitor import DeviceMonitor
from memsaver_server.dry_run import expected_s, plan_release, plan_resume
from memsaver_server.engine import DrainMode, DrainTimeoutError, Engine, memory_of
from memsaver_server.http.auth import caller
from memsaver_server.http.connection_limits import Connections
from memsaver_server.http.errors import BadRequestError, NotFoundError, error_response
from memsaver_server.http.fairness import FairQueue
from memsaver_server.http.request_signing import NonceCache
from memsaver_server.http.serializers import accepted_answer, operation_answer, plan_answer, prepared_answer
from memsaver_server.http.shutdown import ServerEndsError
from memsaver_server.lifecycle import Lifecycle
from memsaver_server.log_output import relay
from memsaver_server.metrics import Metrics
from memsaver_server.operation import Operation, OperationRequest, ReleaseRequest, ResumeRequest, Stall
from memsaver_server.ranks.watch import stopped_ranks
from memsaver_server.schemas import Fields, ReleaseFields, ResumeFields
from memsaver_server.settings import Settings
from memsaver_server.threads import in_thread
from memsaver_server.two_phases import TwoPhaseFields, TwoPhaseReleaseFields, TwoPhaseResumeFields

#: Longest interval at which waiters check for a stall and for the end of a rank, seconds.
STALL_CHECK_S = 0.5
#: How long a call that cancels waits for the end of the operation, seconds.
CANCEL_S = 5.0
#: Time for the lines of the audit file to be written when the service closes, seconds.
AUDIT_CLOSE_S = 1.0


class PhaseTimeoutError(MemsaverError):
    """``operation`` has made no progress in ``phase`` for too long. It continues."""

    kind = "phase_timeout"
    status = 504

    def __init__(self, operation: Operation, stall: Stall) -> None:
        self.operation = operation
        self.phase = stall.phase
        super().__init__(operation.stall_message(stall))

    def details(self) -> dict[str, Any]:
        return {"phase": self.phase, "operation_id": self.operation.id}


class CancelTimeoutError(PhaseTimeoutError):
    """``operation`` was cancelled, in a step that is not interrupted. It ends with that step."""

    def __init__(self, operation: Operation, stopped: str) -> None:
        self.operation = operation
        self.phase = operation.phase
        MemsaverError.__init__(
            self,
            f"{operation.request.operation} {operation.id} is cancelled, but its phase {operation.phase!r} cannot be "
            f"interrupted and has not ended in {CANCEL_S:g} s. Memory and admission are as before once it has; "
            f"GET /operations/{operation.id} shows that{f'; {stopped}' if stopped else ''}",
        )


class Service:
    """One engine, served."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        relay()
        self.engine = engine
        self.settings = settings
        self.audit = AuditLog(settings.audit_file)
        self.monitor = DeviceMonitor(memory=memory_of(engine))
        self.lifecycle = Lifecycle(engine, settings, self._record)
        self.connections = Connections()
        self.metrics = Metrics(self.monitor, self.lifecycle, self.connections.figures)
        self.nonces = NonceCache()
        self.fair_queue = FairQueue()
        self._stall_loggers: dict[str, asyncio.Task[None]] = {}
        self.closing = threading.Event()

    def close(self) -> None:
        """End the streams and threads that would keep a server from stopping. Operations in flight continue."""
        self.closing.set()
        self.monitor.stop()
        self.lifecycle.operations.close()
        self.audit.close(AUDIT_CLOSE_S)

    async def release(self, request: Request, fields: ReleaseFields) -> Operation:
        """Start a release or join the one in flight; wait for its end unless ``fields.run_async``.

        Raises:
            PhaseTimeoutError: it stalls. It continues.
            ServerEndsError: the server shuts down first.
            Also as Lifecycle.release.
        """
        return await self._run(request, self._release_request(fields), wait=fields.wait, run_async=fields.run_async)

    async def resume(self, request: Request, fields: ResumeFields) -> Operation:
        """As release, for a resume."""
        return await self._run(request, _resume_request(fields), wait=fields.wait, run_async=fields.run_async)

    async def in_phases(self, request: Request, fields: TwoPhaseReleaseFields | TwoPhaseResumeFields) -> JSONResponse:
        """Prepare an operation, commit one that is prepared, or run one as a whole; return the response.

        Raises:
            As ``release`` and ``commit``.
        """
        if fields.commit is not None:
            return await self.commit(fields.commit, "release" if isinstance(fields, ReleaseFields) else "resume")
        if isinstance(fields, ReleaseFields):
            operation = await self.release(request, fields)
        else:
            operation = await self.resume(request, fields)
        if operation.status == "prepared" and not fields.run_async:
            return JSONResponse(self._prepared(operation))
        return answer(operation, run_async=fields.run_async)

    async def commit(self, operation_id: str, kind: str = "") -> JSONResponse:
        """Let a prepared operation go on, and return the response to it.

        Raises:
            NotFoundError: it is not remembered.
            BadRequestError: it is not of this ``kind``.
            LeaseEndedError: it is not prepared any more.
            Also as ``finished``.
        """
        operation = self.find(operation_id)
        verb = operation.request.operation
        if kind and kind != verb:
            raise BadRequestError(f"operation {operation_id} is a {verb}; commit it by POST /{verb}_memory_occupation")
        try:
            self.lifecycle.operations.commit(operation)
        finally:
            if operation.lease is not None and (operation.lease.committed or operation.lease.requested):
                await self.finished(operation)  # a caller that is refused finds all as before
        return answer(operation)

    def find(self, operation_id: str) -> Operation:
        """Return the operation, or raise NotFoundError if it is not remembered."""
        found = self.lifecycle.operations.get(operation_id)
        if found is None:
            raise NotFoundError(f"no operation {operation_id!r} is remembered; GET /operations lists those that are")
        return found

    def _prepared(self, operation: Operation) -> dict[str, Any]:
        request = operation.request
        if isinstance(request, ReleaseRequest):
            plan = plan_release(self.lifecycle, request)
        else:
            plan = plan_resume(self.lifecycle, request, ())
        return prepared_answer(operation, plan, expected_s(plan, self.lifecycle.operations.recent()))

    async def plan(self, fields: ReleaseFields | ResumeFields) -> JSONResponse:
        """Return the response to a dry run: what the release or the resume would do.

        Raises:
            UnknownTagError, NotEnoughToReleaseError: as the operation would.
        """
        if isinstance(fields, ReleaseFields):
            return JSONResponse(plan_answer(plan_release(self.lifecycle, self._release_request(fields))))
        sample = await self.monitor.fresh()
        return JSONResponse(plan_answer(plan_resume(self.lifecycle, _resume_request(fields), sample.devices)))

    async def pause(self, mode: DrainMode, timeout_s: float | None, *, asleep: bool = False) -> None:
        """See Lifecycle.pause."""
        try:
            await in_thread(self.lifecycle.pause, mode, self._drain_timeout_s(timeout_s), asleep=asleep)
        except DrainTimeoutError as late:
            raise DrainTimeoutError(late.seconds, late.pending, "generation was not paused") from None

    def _release_request(self, fields: ReleaseFields) -> ReleaseRequest:
        options = ReleaseOptions.of(**fields.core_options())
        timeout_s, verify = self._drain_timeout_s(fields.timeout_s), fields.verify is not None
        return ReleaseRequest(options, timeout_s, fields.mode, fields.at_least_bytes, verify, **_phases(fields))

    def _drain_timeout_s(self, asked_s: float | None) -> float:
        return self.settings.drain_timeout_s if asked_s is None else asked_s

    async def _run(self, request: Request, asked: OperationRequest, *, wait: bool, run_async: bool) -> Operation:
        key = request.headers.get("idempotency-key")
        try:
            if isinstance(asked, ReleaseRequest):
                operation = self.lifecycle.release(asked, wait=wait, key=key, client=caller(request))
            else:
                operation = self.lifecycle.resume(asked, wait=wait, key=key, client=caller(request))
        except Exception as error:
            self.metrics.count(asked.operation, error_response(error).kind)
            raise
        self._log_stalls(operation)
        if run_async:
            return operation
        if asked.prepare:
            await self._reached(operation.settled(), operation)
        if operation.status != "prepared":
            await self.finished(operation)
        return operation

    def _log_stalls(self, operation: Operation) -> None:
        """Log where ``operation`` stalls, even if no client waits for it."""
        if operation.id in self._stall_loggers or operation.done.done():
            return
        task = asyncio.get_running_loop().create_task(operation.log_stalls(self._stall_check_s))
        self._stall_loggers[operation.id] = task
        task.add_done_callback(lambda _: self._stall_loggers.pop(operation.id))

    async def finished(self, operation: Operation) -> None:
        """Wait until ``operation`` has ended.

        Raises:
            PhaseTimeoutError: the operation in progress stalls.
            ServerEndsError: the server shuts down first.
            Also the error of a rank of the engine that has ended, whose drain may take long.
        """
        await self._reached(operation.ended(), operation)

    async def cancelled(self, operation: Operation) -> None:
        """Wait until ``operation``, which was cancelled, has ended.

        Raises:
            CancelTimeoutError: it has not for ``CANCEL_S``.
            Also the errors of ``finished``.
        """
        try:
            await asyncio.wait_for(self.finished(operation), CANCEL_S)
        except asyncio.TimeoutError:
            raise CancelTimeoutError(operation, stopped_ranks(self.lifecycle.memory.status().ranks)) from None

    async def _reached(self, ended: asyncio.Future[None], operation: Operation) -> None:
        """Wait for ``ended``, a future of ``operation``; raises as ``finished``."""
        while not ended.done():
            try:
                await asyncio.wait({ended}, timeout=self._stall_check_s)
            except asyncio.CancelledError:
                if self.closing.is_set():
                    raise ServerEndsError(
                        f"the server is shutting down while {operation.request.operation} {operation.id} is in phase "
                        f"'{operation.phase}'; the operation continues while the process lives"
                    ) from None
                raise
            if not ended.done():
                self.lifecycle.raise_if_rank_lost()
            running = self.lifecycle.operations.running
            stall = running.stall() if running is not None and not ended.done() else None
            if running is not None and stall is not None:
                raise PhaseTimeoutError(running, stall)

    @property
    def _stall_check_s(self) -> float:
        return min(STALL_CHECK_S, self.settings.phase_timeout_s / 4)

    def _record(self, operation: Operation) -> None:
        outcome = "success" if operation.error is None else error_response(operation.error).kind
        self.metrics.record(operation, outcome)
        self.audit.record(operation, outcome)
        tracing.record(operation, outcome)
        if operation.phases and operation.status != "cancelled":  # what was reserved is given back after the last phase
            self.monitor.note(operation.phases[-1].devices)


def _resume_request(fields: ResumeFields) -> ResumeRequest:
    options = ResumeOptions(**fields.core_options())
    return ResumeRequest(options, fields.wait_for_memory_s, fields.verify is not None, **_phases(fields))


def _phases(fields: Fields) -> dict[str, Any]:
    if not isinstance(fields, TwoPhaseFields):
        return {}
    return fields.model_dump(include={"prepare", "lease_s"}, exclude_none=True)


def answer(operation: Operation, *, run_async: bool = False) -> JSONResponse:
    """Return the response to the caller of ``operation``: its result, or with ``run_async`` its address."""
    if run_async:
        accepted = accepted_answer(operation)
        return JSONResponse(accepted, 202, headers={"Location": accepted["location"]})
    if operation.error is not None:
        error = error_response(operation.error)
        return JSONResponse(operation_answer(operation), error.status, headers=error.headers)
    return JSONResponse(operation_answer(operation))


def event_stream(events: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
