"""What a rank does with tokenspeed's ``EventLoop``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from memsaver_core.errors import MemsaverError
from memsaver_core.hibernation.preconditions import register_check
from memsaver_server.engine import DrainTimeoutError
from memsaver_server.integrations.scheduler_loop.work import Work

#: tokenspeed sets NCCL_CUMEM_ENABLE=0 whatever the environment has, and its all-reduces have buffers of all ranks.
_SHARED = (
    "tokenspeed's ranks share device memory, in NCCL and for their all-reduces, that cannot be checkpointed; release "
    "without hibernate, or run one rank"
)


class LoopWork(Work):
    """Admission is that of tokenspeed's ``PauseController``: unless that is UNPAUSED, what is not refused waits.

    Attributes:
        frozen: nothing is computed until ``open``.
    """

    def __init__(self, loop: Any) -> None:
        super().__init__()
        self._loop = loop
        self._pause = loop._pause
        self._module = importlib.import_module("tokenspeed.runtime.engine.pause")
        self._paused_before: Any = None  # the state before ``close``; None while admission is open
        self._draining = self.frozen = False
        self._closed: tuple[str, int] = ("", 0)  # the reason, and how many requests may wait
        self._held = 0
        if loop.server_args.mapping.world_size > 1:
            register_check(lambda: [_SHARED])

    def is_still(self) -> bool:
        """Whether no request runs, no page of the cache is copied to the host, and no expert's weights are moved.

        For a drain also whether prefixes can be forgotten, which is then done: tokenspeed waits for it, too.
        """
        copies = getattr(self._loop, "_num_inflight_cache_ops", False)  # up to 0.1.0
        moves = getattr(self._loop._memory, "_weights_busy", bool)  # from 0.1.1 on
        still = not copies and not moves() and bool(self._module.scheduler_drained(self._loop.scheduler))
        return still and (not self._draining or self._forgets())

    def has_nothing_to_do(self) -> bool:
        pause = self._pause
        waiting = pause.buffered_specs and not pause.is_paused
        compiling = self._loop.request_handler.grammar_manager.grammar_queue
        return not (waiting or compiling or pause.is_drain_pending) and self.is_still()

    def in_flight(self) -> list[str]:
        waiting = {spec.request_id for spec in list(self._pause.buffered_specs)}
        return [rid for rid in list(self._loop.output_processor.rid_to_state) if rid not in waiting]

    def close(self, reason: str, hold: int) -> None:
        """Let ``hold`` new requests wait and refuse others; tokenspeed does not continue generation until ``open``."""
        self._closed = (reason, hold)
        if self._paused_before is None:
            self._paused_before = self._pause.state
            self._pause.state = max(self._pause.state, self._module.PauseState.PAUSED_NEW)
        self._pause.released = True

    def refuse(self, specs: Sequence[Any], states: Sequence[Any]) -> None:
        """Mark those of the new requests as ended that may not wait: tokenspeed answers them before they are admitted.

        Its health check takes any answer as a sign of life; its server does not start without that to its warm-up.
        """
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
        """Have running requests end, those that a pause has frozen too; ``abort`` ends them now."""
        self._draining = not self.frozen
        self._pause.state = self._module.PauseState.PAUSED_NEW
        self._pause._abort_all_pending = self._pause._abort_all_pending or abort

    def freeze(self) -> None:
        """Compute nothing until ``open``.

        Raises:
            DrainTimeoutError: a request runs.
        """
        if not self.is_still():
            raise DrainTimeoutError(0, self.in_flight())
        self._draining, self.frozen = False, True
        self.stay_frozen()
        self.save_buffers()

    def stay_frozen(self) -> None:
        """A pause that tokenspeed was asked for meanwhile would have it iterate again."""
        if self.frozen:
            self._pause.state = self._module.PauseState.PAUSED_ALL

    def open(self) -> None:
        """Take requests again. As by tokenspeed alone, a pause ends with the resume of all memory."""
        if self._paused_before is not None:
            self._pause.released = False
            self._pause.state = self._module.PauseState.UNPAUSED if self.frozen else self._paused_before
            self._paused_before, self._held = None, 0
            self._draining = self.frozen = False

    def flush(self) -> None:
        """Forget every cached prefix.

        Raises:
            MemsaverError: pages are in use.
        """
        if not self._forgets():
            raise MemsaverError("tokenspeed's cache is in use by a transfer; repeat the call")

    def _forgets(self) -> bool:
        """Forget every cached prefix; return False if pages are in use, as they may be from 0.1.1 on."""
        return self._loop._memory._reset_caches() is not False

    def repair(self, lost: Sequence[str]) -> None:
        """As of any engine; also clear the pages of a lost cache."""
        super().repair(lost)
        if "kv_cache" in lost:
            self._loop._memory._kv_repair()

    def models(self) -> list[Any]:
        executor = getattr(self._loop, "model_executor", None)  # up to 0.1.0
        return [(executor or self._loop._device._executor).model_runner.model]
