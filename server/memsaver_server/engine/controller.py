"""The controller of one engine."""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast

from memsaver_core.contract import errors, reports
from memsaver_core.contract.requests import Asked, DrainMode, Fields, Release, ResizeKvCache, Resume
from memsaver_core.contract.status import AdmissionStatus, HealthAnswer, OccupationAnswer, OccupiedDevice
from memsaver_server import clock
from memsaver_server.audit import AuditLog
from memsaver_server.controller import Answer, Capability, Controller, EngineState, Models, kind_of
from memsaver_server.engine import (
    Engine,
    GeneratingEngine,
    ResizableEngine,
    UpdatableEngine,
    WatchedMemory,
    memory_of,
    tracing,
    unwritten_weights,
)
from memsaver_server.engine.balance import Balancer
from memsaver_server.engine.device_monitor import DeviceMonitor, Sample
from memsaver_server.engine.kv_cache import GLANCE_S, ElasticCache
from memsaver_server.engine.lifecycle import Lifecycle, Snapshot
from memsaver_server.engine.memory_breakdown import break_down
from memsaver_server.engine.metrics import EngineMetrics
from memsaver_server.engine.plan import expected_s, plan_release, plan_resume, planned_text, readable
from memsaver_server.engine.tag_selection import released_tags
from memsaver_server.log_output import relay
from memsaver_server.metrics import CallerFigures
from memsaver_server.operation.operation import Operation
from memsaver_server.ranks.watch import is_rank_stopped, stopped_ranks
from memsaver_server.settings import Settings, cache_bounds
from memsaver_server.threads import in_thread

#: Longest interval at which waiters check for a stall and for the end of a rank, seconds.
STALL_CHECK_S = 0.5
#: How long a call that cancels waits for the end of the operation, seconds.
CANCEL_S = 5.0
#: How long a coordinator holds the engine after it has asked last, seconds.
HELD_S = 30.0
#: A coordinator that lives asks more often than this, seconds.
ASKS_S = 5.0
#: Time limit for the token of ``generates``, seconds.
GENERATE_TIMEOUT_S = 20.0
#: Errors of ``UpdatableEngine`` after which its weights are as before.
_NOTHING_WRITTEN = (ValueError, OSError)


class EngineController(Controller[Operation]):
    """Controls one engine. The program that runs the engine may use ``lifecycle``."""

    models = Models()

    def __init__(self, engine: Engine, settings: Settings) -> None:
        relay()
        self.engine = engine
        self.name = engine.name
        kinds: dict[Capability, type] = {"generate": GeneratingEngine, "update": UpdatableEngine}
        self.capabilities = frozenset(name for name, kind in kinds.items() if isinstance(engine, kind))
        self.closing = threading.Event()
        self.callers = CallerFigures()
        self._settings = settings
        self._stall_check_s = min(STALL_CHECK_S, settings.phase_timeout_s / 4)
        self._audit = AuditLog(settings.audit_file)
        self._monitor = DeviceMonitor(memory=memory_of(engine))
        self.lifecycle = Lifecycle(engine, settings, self._record)
        self.operations = self.lifecycle.operations
        bounds = cache_bounds(settings.kv_cache) if settings.kv_cache else None
        self._cache = ElasticCache(engine, self.lifecycle, bounds) if isinstance(engine, ResizableEngine) else None
        self.lifecycle.fit_cache = None if self._cache is None else self._cache.fit
        self._metrics = EngineMetrics(self._monitor, self.lifecycle, self._cache, self.callers)
        self._id = uuid.uuid4().hex[:12]
        self._held: dict[str, tuple[float, float]] = {}  # by coordinator: when it asked first, and when last
        self._stall_loggers: dict[str, asyncio.Task[None]] = {}
        self._balancer: Balancer | None = None
        if bounds is not None and self._cache is not None:
            self._balancer = Balancer(self._cache, self.lifecycle, self._id)
            self.lifecycle.release_cache, self.lifecycle.ask_for_memory = self._balancer.release, self._balancer.ask
            self._balancer.start()  # not in start(), which is not called in another application

    async def start(self) -> None:
        self._monitor.start()

    def close(self) -> None:
        self.closing.set()
        if self._balancer is not None:
            self._balancer.stop()
        self._monitor.stop()
        self.operations.close()
        self._audit.close()

    async def end(self) -> None:
        self.close()

    # -- operations ----------------------------------------------------------------------------------------------------

    async def submit(self, asked: Asked, *, client: str, key: str | None) -> Operation:
        try:
            resolved = asked.resolved(self._settings.drain_timeout_s)
            if isinstance(resolved, ResizeKvCache):
                operation = await in_thread(self._elastic.start, resolved, key=key, client=client)
            else:
                operation = self.lifecycle.start(resolved, key=key, client=client)
        except Exception as error:
            self._metrics.count(asked.operation, kind_of(error))
            raise
        if operation.id not in self._stall_loggers and not operation.done.done():
            # Its stalls are logged also if no client waits for it.
            task = asyncio.get_running_loop().create_task(operation.log_stalls(self._stall_check_s))
            self._stall_loggers[operation.id] = task
            task.add_done_callback(lambda _: self._stall_loggers.pop(operation.id))
        return operation

    async def attend(self, operation: Operation, *, prepared: bool) -> None:
        if prepared:
            await self._reached(operation, operation.settled())
        if operation.status != "prepared":
            await self._reached(operation, operation.ended())

    def answer(self, operation: Operation) -> Answer:
        if not operation.has_ended:
            return Answer.of(self._prepared(operation))
        if operation.error is None:
            assert operation.report is not None
            resized = isinstance(operation.report, reports.ResizedReport)
            holder = "" if resized else self._holder(operation.client.partition(" ")[2])
            return Answer.of(
                (reports.ResizedAnswer if resized else reports.OperationAnswer)(
                    **dict(operation.report),
                    success=True,
                    message=_message(operation.report) + (reports.held_by(holder) if holder else ""),
                    coordinator=holder,
                    operation_id=operation.id,
                    state=operation.memory_state,
                    weights_version=operation.weights_version,
                )
            )
        failed = Answer.failure(operation.error)
        if operation.log.failed:
            failed.body["error"].setdefault("phase", operation.log.failed)
        return failed.of_operation(
            operation=operation.request.operation,
            operation_id=operation.id,
            state=operation.memory_state,
            seconds=operation.seconds,
            phases=[phase.model_dump(mode="json") for phase in operation.phases],
        )

    async def commit(self, operation: Operation, key: str | None = None) -> None:
        try:
            operation.commit(key)
        finally:
            if operation.request.prepare and (operation.committed or operation.cancelled_by is not None):
                await self._reached(operation, operation.ended())  # so that all is undone when a caller is refused

    async def cancel(self, operation: Operation, by: str, key: str | None = None, *, force: bool = False) -> None:
        operation.check_owner(key, by if force else None)
        self.operations.cancel(operation, by)
        try:
            await asyncio.wait_for(self._reached(operation, operation.ended()), CANCEL_S)
        except asyncio.TimeoutError:
            stopped = stopped_ranks(self.lifecycle.memory.status().ranks)
            raise errors.PhaseTimeoutError(
                f"{operation.request.operation} {operation.id} is cancelled, but its phase {operation.phase!r} cannot "
                f"be interrupted and has not ended in {CANCEL_S:g} s. Memory and admission are as before once it has; "
                f"GET /operations/{operation.id} shows that{f'; {stopped}' if stopped else ''}",
                operation.phase,
                operation.id,
            ) from None

    async def plan(self, asked: Asked) -> Answer:
        asked = asked.resolved(self._settings.drain_timeout_s)
        if isinstance(asked, Release):
            return Answer.of(plan_release(self.lifecycle, asked))
        devices = (await self._monitor.fresh()).devices
        if isinstance(asked, Resume):
            return Answer.of(plan_resume(self.lifecycle, asked, devices))
        return Answer.of(await in_thread(self._elastic.plan, asked, devices))

    def _prepared(self, operation: Operation) -> reports.PreparedAnswer:
        asked, lifecycle = operation.request, self.lifecycle
        assert not isinstance(asked, ResizeKvCache), "it is never prepared"
        plan = plan_release(lifecycle, asked) if isinstance(asked, Release) else plan_resume(lifecycle, asked, ())
        path = f"/{plan.operation}_memory_occupation"
        return reports.PreparedAnswer(
            message=f"prepared to {planned_text(plan.operation, plan.tags)}. POST {path} with commit={operation.id} "
            f"does it; POST /operations/{operation.id}/abort undoes the preparation, as does the end of the lease",
            **dict(operation.prepared_state()),
            expected_s=expected_s(plan, self.operations.recent()),
            tags=plan.tags,
        )

    async def _reached(self, operation: Operation, reached: asyncio.Future[None]) -> None:
        """Wait for ``reached``, a future of ``operation``; raises as ``attend``."""
        while not reached.done():
            await asyncio.wait({reached}, timeout=self._stall_check_s)
            if reached.done():
                return
            if isinstance(self.lifecycle.memory, WatchedMemory):
                self.lifecycle.memory.raise_if_failed()
            running = self.operations.running
            if running is not None and (stall := running.stall()) is not None:
                raise errors.PhaseTimeoutError(running.stall_message(stall), stall.phase, running.id)

    @property
    def _elastic(self) -> ElasticCache:
        if self._cache is None:
            raise errors.UnsupportedError("this engine cannot change the size of its KV cache while it serves")
        return self._cache

    def _holder(self, asker: str) -> str:
        """Return the coordinator other than ``asker`` that asked last; empty if none did in the last ``HELD_S``. One
        that asked neither in the last ``ASKS_S`` nor since ``asker`` first did is a predecessor that has ended."""
        now = clock.monotonic()
        since = max(now - HELD_S, min(now - ASKS_S, self._held.get(asker, (0.0, 0.0))[0]))
        others = ((last, name) for name, (_, last) in self._held.items() if name != asker and last > since)
        return max(others, default=(0.0, ""))[1]

    def _record(self, operation: Operation) -> None:
        outcome = "success" if operation.error is None else kind_of(operation.error)
        self._metrics.record(operation, outcome)
        self._audit.record(operation, outcome)
        tracing.record(operation, outcome)
        if operation.phases and operation.status != "cancelled":  # what was reserved is given back after the last phase
            self._monitor.note(operation.phases[-1].devices)

    # -- state ---------------------------------------------------------------------------------------------------------

    async def occupation(self, coordinator: str = "") -> dict[str, Any]:
        if coordinator:
            now = clock.monotonic()
            self._held = {name: asked for name, asked in self._held.items() if asked[1] > now - HELD_S}
            self._held[coordinator] = self._held.get(coordinator, (now, now))[0], now
        return self._occupation(await self._fresh(), coordinator).model_dump(mode="json")

    async def rows(self, selected: Fields | None) -> Sequence[EngineState]:
        now = self.lifecycle.snapshot()
        return [
            EngineState(
                name=self.name,
                url="",
                state=now.state,
                asleep=self.lifecycle.is_sleeping,
                released=tuple(sorted(released_tags(now.status))),
                tags=frozenset(tag.tag for tag in now.status.tags),
            )
        ]

    def health(self, *, ready: bool) -> HealthAnswer:
        now = self.lifecycle.snapshot()
        return _health(now, self._unready_reason(now) if ready else self._failed_reason(now))

    async def generates(self) -> Answer:
        now = self.lifecycle.snapshot()
        reason = self._unready_reason(now)
        if not reason and isinstance(self.engine, GeneratingEngine):
            one_token = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            try:
                await asyncio.wait_for(self.engine.generate(one_token), GENERATE_TIMEOUT_S)
            except asyncio.TimeoutError:
                reason = f"no token within {GENERATE_TIMEOUT_S:g} s"
            except errors.AdmissionClosedError as closed:
                reason = str(closed)
            except Exception as error:
                reason = f"cannot generate: {type(error).__name__}: {error}"
            now = self.lifecycle.snapshot()
        return Answer.of(_health(now, reason), 503 if reason else 200)

    def version(self) -> dict[str, str]:
        return {
            **super().version(),
            "torch": metadata.version("torch"),
            "driver": self.lifecycle.snapshot().status.driver,
            "engine": self.name,
        }

    def scrape(self) -> bytes:
        if self._cache is not None:
            self._cache.ask()  # for the next scrape: this one waits for nothing
        return self._metrics.scrape()

    def _failed_reason(self, now: Snapshot) -> str:
        if now.state != "failed" and self.engine.is_alive():
            return ""
        return now.closed_reason or f"engine {self.name!r} is dead"

    def _unready_reason(self, now: Snapshot) -> str:
        return self._failed_reason(now) or now.closed_reason or stopped_ranks(now.status.ranks)

    async def _fresh(self) -> Sample:
        """Return a new sample of the devices; the engine has a moment to say how large its KV cache is."""
        if self._cache is not None:
            await asyncio.wait({self._cache.ask()}, timeout=GLANCE_S)
        return await self._monitor.fresh()

    def _occupation(self, sample: Sample, asker: str = "") -> OccupationAnswer:
        """Return what the process holds now, with the devices as in ``sample``, to ``asker``, a coordinator."""
        now = self.lifecycle.snapshot()
        status = now.status
        lost = {"content": "lost"}
        more = {
            "state": now.state,
            "tags": [tag.model_copy(update=lost) if tag.tag in now.unwritten else tag for tag in status.tags],
            **_host(),
            "ranks": [rank.model_copy(update={"stopped": is_rank_stopped(rank)}) for rank in status.ranks],
        }
        return OccupationAnswer(
            **{**dict(status), **more},
            engine=self.name,
            weights_version=self.lifecycle.weights_version,
            engine_id=self._id,
            model=str(getattr(self.engine, "model_name", None) or ""),
            admission=AdmissionStatus(open=not now.closed_reason, reason=now.closed_reason),
            operation_id=now.running.id if now.running and now.running.request.operation != "resize" else None,
            updating=now.updating,
            prepared=now.running.prepared_state() if now.running and now.running.status == "prepared" else None,
            coordinator=self._holder(asker) or asker,
            shared_by_ranks=status.shared,
            kv_cache=self._cache.latest(sample.devices) if self._cache else None,
            devices=tuple(
                OccupiedDevice(
                    **dict(device),
                    free_bytes=device.unused_bytes,
                    sources=tuple(break_down(device, sample)),
                )
                for device in sample.devices
            ),
        )

    # -- the dashboard -------------------------------------------------------------------------------------------------

    def readings(self) -> Iterable[dict[str, Any]]:
        return [
            {"at": sample.at, "used_bytes": {device.index: device.used_bytes for device in sample.devices}}
            for sample in self._monitor.history()
        ]

    async def shown(self) -> dict[str, Any]:
        sample = await self._fresh()
        return {"at": sample.at, **self._occupation(sample).model_dump(mode="json")}

    # -- calls of the engine -------------------------------------------------------------------------------------------

    async def pause(
        self, selected: Fields, mode: DrainMode, timeout_s: float | None, *, asleep: bool = False
    ) -> Answer:
        limit_s = self._settings.drain_timeout_s if timeout_s is None else timeout_s
        try:
            await in_thread(self.lifecycle.pause, mode, limit_s, asleep=asleep)
        except errors.DrainTimeoutError as late:
            raise errors.DrainTimeoutError(late.seconds, late.pending, "generation was not paused") from None
        return Answer.message("Scheduling paused; memory stays." if asleep else "Generation paused.")

    async def continue_(self, selected: Fields, *, scheduling: bool = False) -> Answer:
        closed_reason = self.lifecycle.continue_generation()
        if scheduling:
            return Answer.message("Scheduling continues.")
        return Answer.message(f"Generation continues{f' once possible: {closed_reason}' if closed_reason else ''}.")

    async def kv_cache(self) -> Answer:
        return Answer.of(await in_thread(self._elastic.read, (await self._monitor.fresh()).devices))

    async def flush(self, selected: Fields) -> Answer:
        await in_thread(self.engine.flush_cache)
        return Answer.message("Cache flushed.")

    async def written(self, selected: Fields, tags: Sequence[str], version: str | None) -> Answer:
        closed_reason = self.lifecycle.content_written(tags, version)
        return self._written(f"Content counts as written{f'; {closed_reason}' if closed_reason else ''}.")

    async def generate(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await cast(GeneratingEngine, self.engine).generate(asked)
        except ValueError as error:
            raise errors.BadRequestError(str(error)) from None
        if "meta_info" in answer:  # as in SGLang's answers
            answer["meta_info"]["weight_version"] = self.lifecycle.weights_version
        return answer

    async def update(self, selected: Fields, asked: Fields, source: Literal["disk", "tensor"]) -> Answer:
        write: Callable[..., int] = getattr(self.engine, f"update_weights_from_{source}")
        given = dict(asked)
        version = given.pop("weight_version")
        first = given.pop("model_path" if source == "disk" else "serialized_named_tensors")

        def update() -> int:
            path = first if source == "disk" else None
            with self.lifecycle.writing(version=version, refusals=_NOTHING_WRITTEN, path=path):
                return write(first, **given)

        try:
            written = await in_thread(update)
        except _NOTHING_WRITTEN as error:
            raise errors.BadRequestError(str(error)) from None
        missing = sorted(unwritten_weights(self.engine))
        more = f" {len(missing)} that a release discarded are missing: {', '.join(missing[:8])}." if missing else ""
        return self._written(f"{written} tensors written.{more}")

    def _written(self, message: str) -> Answer:
        return Answer.of(reports.WrittenAnswer(message=message, weights_version=self.lifecycle.weights_version))


@cache
def _host() -> dict[str, Any]:
    """Return what identifies this machine, and its memory."""
    host_id = ""
    with suppress(OSError):
        host_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"host_id": host_id, "host_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")}


def _health(now: Snapshot, reason: str) -> HealthAnswer:
    return HealthAnswer(status="unavailable" if reason else "ok", state=now.state, reason=reason)


def _message(report: reports.OperationReport) -> str:
    if not report.enabled:
        return f"memsaver is disabled in this process: nothing to {report.operation}"
    if isinstance(report, reports.ResizedReport):
        cache = report.kv_cache
        size = f"the KV cache has {readable(cache.bytes)} of {readable(cache.full_bytes)}"
        if not (report.released_bytes or report.resumed_bytes):
            return f"{size} already: nothing to resize"
        does = "released" if report.released_bytes else "resumed"
        return f"{size}: {does} {readable(report.released_bytes or report.resumed_bytes)} in {report.seconds:.3f} s"
    release = report.operation == "release"
    if moved := report.released_bytes if release else report.resumed_bytes:
        names = ", ".join(tag.tag for tag in report.tags if tag.released_bytes or tag.resumed_bytes)
        of = f" of {names}" if names else ""  # a repeat after the operation was forgotten gets only sums
        return f"{'released' if release else 'resumed'} {readable(moved)}{of} in {report.seconds:.3f} s"
    if any(tag.bytes for tag in report.tags):
        return f"{'released' if release else 'resident'} already: nothing to {report.operation}"
    return f"no memory under these tags: nothing to {report.operation}"
