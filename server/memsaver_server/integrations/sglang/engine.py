"""SGLang as an ``Engine``.

The names of SGLang used in this folder are those of the commit that docs/sglang.md gives.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core.errors import ConfigurationError
from memsaver_server.engine import DrainMode, DrainTimeoutError, Engine, check_drain_mode, never
from memsaver_server.integrations.sglang.scheduler import Intake, SchedulerThread

#: The longest iteration of an idle event loop, with --sleep-on-idle, and some more, seconds.
ITERATION_S = 2.0


class SglangEngine(Engine):
    """An engine over a SGLang ``Scheduler``, which must be the only rank.

    The scheduler is touched in its own thread alone, once per iteration of its event loop: there requests are admitted,
    held or refused, and there the service's work is done, between two batches. A refused request is aborted with status
    503, which SGLang's server answers to its client.
    """

    name = "sglang"

    @property
    def model_name(self) -> str:
        return str(getattr(getattr(self._scheduler, "server_args", None), "model_path", ""))

    def __init__(self, scheduler: Any) -> None:
        """Take over the intake of ``scheduler``, before its event loop runs.

        Raises:
            ConfigurationError: this scheduler cannot be served; the message says why.
        """
        _check(scheduler)
        self._scheduler = scheduler
        self._messages = importlib.import_module("sglang.srt.managers.io_struct")
        self._intake = Intake(scheduler, self._messages)
        self._thread = SchedulerThread(scheduler)
        # Of the scheduler's thread alone.
        self._drains: list[Future[None]] = []
        self._frozen = False
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        #: Called in the scheduler's thread after it has carried out a weight update; the plugin sets it.
        self.on_weights_updated: Callable[[], None] = lambda: None
        self._process_input_requests = scheduler.process_input_requests
        scheduler.process_input_requests = self._process

    # The methods of ``Engine``.

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self._intake.close(reason, hold)

    def open_admission(self) -> None:
        self._intake.open()
        self._thread.submit(lambda: self._thaw() if self._intake.is_open else None)

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        """Bring the scheduler to a standstill until `open_admission`.

        With ``keep`` running requests go back to SGLang's waiting queue, and are computed again from their tokens.

        Raises:
            DrainTimeoutError: it took longer, or was given up; the scheduler continues as before.
            ValueError: the mode is unknown.
        """
        check_drain_mode(mode)
        begun_at = time.monotonic()
        still: Future[None] = Future()
        froze = False

        def begin() -> None:
            nonlocal froze
            if mode == "abort":
                self._scheduler.abort_request(self._messages.AbortReq(rid="", abort_all=True))
            elif mode == "keep":
                froze = self._freeze()
            self._drains.append(still)
            self._end_drains()

        def give_up() -> None:
            if still in self._drains:
                self._drains.remove(still)
                if froze:
                    self._thaw()

        begun = self._thread.submit(begin)
        # Without any time left, too, one iteration is tried.
        self._thread.wait_for(begun, max(timeout_s, ITERATION_S), given_up)
        if begun.cancel():
            raise DrainTimeoutError(timeout_s, self._in_flight())
        begun.result()
        self._thread.wait_for(still, begun_at + timeout_s - time.monotonic(), given_up)
        if not still.done():
            self._thread.submit(give_up)
            raise DrainTimeoutError(timeout_s, self._in_flight())
        still.result()

    def flush_cache(self) -> None:
        """Forget every cached prefix. Touches no memory that is released.

        Raises:
            DrainTimeoutError: requests are running, under which SGLang does not flush.
        """
        self._thread.run(self._flush)

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """Write buffers back into weights that came back without content, and forget the prefixes of a lost cache.

        The weights themselves are then written by SGLang's own update calls.
        """
        self._thread.run(lambda: self._repair(lost))

    # In the scheduler's thread.

    def _process(self, received: Sequence[Any]) -> None:
        """Stands in for ``Scheduler.process_input_requests``, which the event loop calls in each iteration."""
        self._thread.note_current()
        self._process_input_requests(self._intake.admit(received or ()))
        if any(_is_weight_update(each) for each in received or ()):
            self.on_weights_updated()
        self._thread.run_pending()
        self._end_drains()

    def _end_drains(self) -> None:
        if not (self._drains and self._is_still()):
            return
        drains, self._drains = self._drains, []
        try:
            self._save_buffers()
        except Exception as error:
            for each in drains:
                each.set_exception(error)
        else:
            for each in drains:
                each.set_result(None)

    def _freeze(self) -> bool:
        """Send running requests back to the waiting queue; return whether there were any."""
        if self._is_still():
            return False
        already = self._scheduler._engine_paused
        self._scheduler.pause_generation(self._messages.PauseGenerationReqInput(mode="retract"))
        self._frozen = self._frozen or not already  # a pause that another caller asked for is theirs to end
        return not already

    def _thaw(self) -> None:
        if self._frozen:
            self._frozen = False
            self._scheduler.continue_generation(self._messages.ContinueGenerationReqInput())

    def _is_still(self) -> bool:
        """Whether no request runs, and no paused one holds a part of the cache."""
        scheduler = self._scheduler
        return scheduler.is_fully_idle() or (
            scheduler._engine_paused
            and scheduler.running_batch.is_empty()
            and scheduler.last_batch is None
            and scheduler.chunked_req is None
        )

    def _flush(self) -> None:
        scheduler = self._scheduler
        if scheduler.is_fully_idle():
            scheduler.flush_cache(empty_cache=False)
            return
        if not self._is_still():
            raise DrainTimeoutError(0, self._in_flight())
        # flush_cache() refuses while requests wait. Those that wait here were retracted and hold nothing of the cache.
        scheduler.tree_cache.reset()
        scheduler.req_to_token_pool.clear()
        scheduler.token_to_kv_pool_allocator.clear()
        scheduler.req_to_token_pool.reset_aux_cache_allocator()
        if scheduler.draft_worker:
            scheduler.draft_worker.clear_cache_pool()

    def _save_buffers(self) -> None:
        """Copy the model's buffers, which no weight update writes, if their memory is resident."""
        if any(tag.released_bytes for tag in ms.status().tags if tag.tag == "weights"):
            return
        model = self._scheduler.tp_worker.model_runner.model
        self._buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in model.buffers()]

    def _repair(self, lost: Sequence[str]) -> None:
        if "weights" in lost:
            with torch.inference_mode():
                for buffer, content in self._buffers:
                    buffer[...] = content
        if "kv_cache" in lost:
            self._flush()

    def _in_flight(self) -> list[str]:
        """Return the names of the requests in flight; also called from other threads."""
        scheduler = self._scheduler
        running = sorted(request.rid for request in scheduler.collect_inflight_reqs())
        return [*running, *(request.rid for request in list(scheduler.waiting_queue))]


def _is_weight_update(request: Any) -> bool:
    """Whether ``request`` is one by which SGLang's server writes weights: from disk, tensors, a group or by IPC.

    An update in several requests counts with its first, as nothing marks the last: its clients resume the KV cache, or
    continue generation, after all of them. Whether one succeeded is told to its client alone, which has to stop then.
    """
    name = type(request).__name__
    return name.startswith("UpdateWeight") and "From" in name


def _check(scheduler: Any) -> None:
    """Raise ConfigurationError if ``scheduler`` cannot be served; the message says why."""
    ranks = scheduler.ps
    mode = getattr(scheduler.disaggregation_mode, "value", scheduler.disaggregation_mode)
    problem = ""
    if ms.enabled() and not scheduler.memory_saver_adapter.enabled:
        problem = "its memory is in no region; start it with --enable-memory-saver"
    elif ms.enabled() and not _is_ours(scheduler.memory_saver_adapter):
        problem = (
            "it uses another torch_memory_saver; install memsaver-torch-memory-saver in place of that, or call "
            "memsaver_core.compat.install() before SGLang is imported"
        )
    elif (ranks.tp_size, ranks.pp_size, ranks.dp_size) != (1, 1, 1):
        problem = (
            f"it is one of several ranks (tp {ranks.tp_size}, pp {ranks.pp_size}, dp {ranks.dp_size}), which release "
            "together by SGLang's own /release_memory_occupation; use that"
        )
    elif mode != "null":
        problem = f"it is the {mode} side of a disaggregated engine"
    elif scheduler.rust_server is not None:
        problem = "requests reach it by SGLang's Rust server; unset SGLANG_RUST_SERVER"
    if problem:
        raise ConfigurationError(f"SGLang's scheduler cannot be served: {problem}")


def _is_ours(adapter: Any) -> bool:
    """Whether SGLang's adapter imported memsaver's module under the name ``torch_memory_saver``."""
    module = importlib.import_module(type(adapter).__module__)
    return getattr(getattr(module, "torch_memory_saver", None), "__name__", "").startswith("memsaver_core.")
