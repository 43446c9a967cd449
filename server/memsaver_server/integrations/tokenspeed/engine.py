"""tokenspeed as an ``Engine``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from memsaver_core.contract.errors import DrainTimeoutError, MemsaverError, UnsupportedError
from memsaver_core.contract.requests import DrainMode
from memsaver_core.hibernation.preconditions import register_check
from memsaver_server.engine import check_drain_mode, never
from memsaver_server.engine.tag_selection import released_tags
from memsaver_server.integrations.adapter import engine as base
from memsaver_server.integrations.tokenspeed.plugin import ADAPTER

#: What an ``EventLoop`` must have: paths of attributes.
NAMES = (
    "_device._executor", "_device._thread", "_memory._kv_cache_release_allowed", "_memory._kv_repair",
    "_memory._reset_caches", "_memory._weights_busy", "_pause._abort_all_pending", "_pause.buffered_specs",
    "_pause.is_drain_pending", "_pause.released", "_pause.state", "attn_tp_cpu_group", "output_processor.rid_to_state",
    "request_handler._drain_reqs", "request_handler.grammar_manager", "request_handler.process_requests",
    "request_handler.recv_func", "request_handler.recv_reqs", "request_handler.send_func", "scheduler",
    "server_args.mapping.attn", "server_args.nnodes", "shutdown_event",
)  # fmt: skip


class TokenspeedScheduler(base.Scheduler):
    """Closes admission by tokenspeed's ``PauseController``: while that is not UNPAUSED, requests wait unless they are
    refused. While it is ``frozen`` nothing is computed."""

    engine = "tokenspeed"

    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self._paused_before: Any = None  # the state before ``close``; None while admission is open
        self._draining = self.frozen = False
        self._closed: tuple[str, int] = ("", 0)  # the reason, and how many requests may wait
        self._held = 0
        self._pause: Any = getattr(own, "_pause", None)

    @property
    def _pausing(self) -> ModuleType:
        return importlib.import_module("tokenspeed.runtime.engine.pause")

    @property
    def topology(self) -> base.Topology:
        """All ranks, which are one tensor-parallel group."""
        attention = self.own.server_args.mapping.attn
        return base.Topology(attention.tp_size, attention.tp_group, attention.tp_rank, self.own.attn_tp_cpu_group)

    def missing(self) -> list[str]:
        return base.lacking(self.own, NAMES, "EventLoop")

    def obstacles(self) -> Iterator[str]:
        settings = self.own.server_args
        yield from base.memory_obstacles(settings.enable_memory_saver, ADAPTER)
        if settings.mapping.attn.tp_size != settings.mapping.world_size:
            yield "its ranks are more than one tensor-parallel group; run a server for each group"
        if settings.nnodes > 1:
            yield "its ranks are on several hosts"
        if settings.disaggregation_mode != "null":
            yield f"it is the {settings.disaggregation_mode} side of a disaggregated engine"
        if not self.own._memory._kv_cache_release_allowed:
            yield "its scheduler cannot forget cached prefixes; start it with --disable-prefix-caching"

    def take_over(self, loop: base.EventLoop) -> None:
        handler = self.own.request_handler
        process = handler.process_requests

        def process_and_refuse(received: list[Any]) -> Any:
            result = process(received)
            self._refuse(*result[:2])
            self._stay_frozen()
            return result

        handler.recv_reqs = partial(loop.beginning, handler.recv_reqs)
        handler.process_requests = lambda received: loop.process(received, process_and_refuse)
        if self.own.server_args.mapping.world_size > 1:
            # tokenspeed always sets NCCL_CUMEM_ENABLE=0, and its all-reduces have buffers of all ranks.
            shared = "tokenspeed's ranks share device memory, in NCCL and for all-reduces, that cannot be checkpointed"
            register_check(lambda: [f"{shared}; release without hibernate, or run one rank"])

    def lead(self, loop: base.LeadingLoop) -> base.IdleRest:
        handler = self.own.request_handler
        receive, socket = handler._drain_reqs, handler.recv_func
        handler._drain_reqs = lambda: loop.handle(receive())
        return base.IdleRest([getattr(socket, "_socket", socket)], self.has_nothing_to_do)

    def is_ending(self) -> bool:
        return bool(self.own.shutdown_event.is_set())

    def is_still(self) -> bool:
        """Return whether no request runs, and no expert's weights move. In a drain prefixes must be forgotten as well,
        which is then done: tokenspeed itself waits for that, too."""
        moves, drained = self.own._memory._weights_busy(), self._pausing.scheduler_drained(self.own.scheduler)
        return bool(drained and not moves and (not self._draining or self._forgets()))

    def has_nothing_to_do(self) -> bool:
        pause = self._pause
        waiting = pause.buffered_specs and not pause.is_paused
        compiling = self.own.request_handler.grammar_manager.grammar_queue
        return not (waiting or compiling or pause.is_drain_pending) and self.is_still()

    def in_flight(self) -> list[str]:
        waiting = {spec.request_id for spec in list(self._pause.buffered_specs)}
        return [rid for rid in list(self.own.output_processor.rid_to_state) if rid not in waiting]

    def close(self, reason: str, hold: int) -> None:
        """Let up to ``hold`` new requests wait, and refuse others. No generation continues until ``open``."""
        self._closed = (reason, hold)
        if self._paused_before is None:
            self._paused_before = self._pause.state
            self._pause.state = max(self._pause.state, self._pausing.PauseState.PAUSED_NEW)
        self._pause.released = True

    def _refuse(self, specs: Sequence[Any], states: Sequence[Any]) -> None:
        """Mark the new requests that may not wait as ended: tokenspeed answers them before it would admit them. Health
        checks are refused: any answer is a sign of life. The warm-up waits: the server starts with its answer only."""
        if self._paused_before is None:
            return
        reason, hold = self._closed
        for spec, state in zip(specs, states, strict=True):
            kind, _, _ = spec.request_id.partition("_")
            if kind == "WARMUP" or (kind != "HEALTH" and self._held < hold):
                self._held += 1
            else:
                state.set_finish_with_abort(reason, notify_client=True)

    def drain(self, abort: bool) -> None:
        """Let running requests end, also those that a pause has frozen; with ``abort`` end them now."""
        self._draining = not self.frozen
        self._pause.state = self._pausing.PauseState.PAUSED_NEW
        self._pause._abort_all_pending = self._pause._abort_all_pending or abort

    def freeze(self) -> None:
        """Compute nothing until ``open``; raise DrainTimeoutError if a request runs."""
        if not self.is_still():
            raise DrainTimeoutError(0, self.in_flight())
        self._draining, self.frozen = False, True
        self._stay_frozen()
        self.save_buffers()

    def _stay_frozen(self) -> None:
        """Set the pause again: a request for another one, received meanwhile, would let tokenspeed compute."""
        if self.frozen:
            self._pause.state = self._pausing.PauseState.PAUSED_ALL

    def open(self) -> None:
        """Take requests again. As in tokenspeed itself, a pause ends once all memory is resumed."""
        if self._paused_before is not None:
            self._pause.released = False
            self._pause.state = self._pausing.PauseState.UNPAUSED if self.frozen else self._paused_before
            self._paused_before, self._held = None, 0
            self._draining = self.frozen = False

    def flush(self) -> None:
        if not self._forgets():
            raise MemsaverError("tokenspeed's cache is in use by a transfer; repeat the call")

    def _forgets(self) -> bool:
        """Forget every cached prefix. Return False if pages are in use."""
        return bool(self.own._memory._reset_caches())

    def save_buffers(self) -> None:
        # Here and below, not in the event loop's thread, where tokenspeed allows no work on the device.
        self.own._device._thread.run(super().save_buffers)

    def repair(self, lost: Sequence[str]) -> None:
        """See ``Scheduler``. Also clears the pages of a lost cache."""
        self.own._device._thread.run(partial(super().repair, lost))
        if "kv_cache" in lost:
            self.own._memory._kv_repair()

    def models(self) -> list[Any]:
        return [self.own._device._executor.model_runner.model]


class TokenspeedEngine(base.LoopEngine):
    """The engine over an ``EventLoop``, whose socket to tokenspeed's server it replaces. In tokenspeed itself, requests
    wait while memory is released, each with a lock that a weight update waits for; here all but a few are refused. Its
    own release has no deadline, fails if repeated, and ends the process if it fails; updates touch released memory."""

    scheduler_class = TokenspeedScheduler

    def __init__(self, scheduler: TokenspeedScheduler) -> None:
        self.model_name = str(scheduler.own.server_args.model)
        self._messages = importlib.import_module("tokenspeed.runtime.engine.io_struct")
        handler = scheduler.own.request_handler
        self._socket, handler.send_func = handler.send_func, self
        super().__init__(scheduler)

    # Methods of ``Engine``.

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self.post("close", reason, hold)

    def open_admission(self) -> None:
        self.post("open")

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        """Bring every rank's event loop to a standstill until `open_admission`; raise UnsupportedError for ``keep``."""
        check_drain_mode(mode)
        if mode == "keep":
            raise UnsupportedError(
                "tokenspeed cannot compute a paused request again from its tokens; release with the mode wait or abort"
            )
        self.when_still(timeout_s, begin=lambda: self.post("drain", mode == "abort"), given_up=given_up)
        self.run_on_all("freeze")
        self.run_on_all("")  # the iteration that freezes has ended: it may call CUDA, the next ones do not

    # tokenspeed's own calls.

    def send_pyobj(self, output: Any) -> None:
        """Send ``output`` to tokenspeed's server; if it answers an update, only note it. In the scheduler's thread."""
        if (answered := self._updates.pop(type(output).__name__, None)) is not None:
            answered.set_result(output)
        else:
            self._socket.send_pyobj(output)

    def _takes(self, request: Any) -> bool:
        if type(request).__name__ == "IsSleepingReqInput":
            sleeping = bool(released_tags(self.memory.status()))
            self._socket.send_pyobj(self._messages.IsSleepingReqOutput(is_sleeping=sleeping))
            return True
        return super()._takes(request)

    def _reply(self, request: Any, output: Any) -> None:
        self.submit(partial(self._socket.send_pyobj, output))
