"""SGLang: the service in the process of its scheduler.

``MEMSAVER_SGLANG=HOST:PORT`` (or the path of a Unix socket) attaches it by SGLang's plugin entry point; ``attach`` does
so by hand. The names used here are those of SGLang at the commit that docs/sglang.md gives.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import torch

import memsaver_core as ms
from memsaver_core.errors import ConfigurationError, MemsaverError
from memsaver_server.engine import DrainMode, DrainTimeoutError

if TYPE_CHECKING:
    from memsaver_server.attachment import Attachment
    from memsaver_server.engine import Engine

#: Where to serve: ``HOST:PORT``, or the path of a Unix socket. Nothing is attached where it is not set.
VARIABLE = "MEMSAVER_SGLANG"

#: How often somebody who waits for the scheduler looks whether it still runs, seconds.
LIVENESS_S = 1.0

#: How long a turn of an idle event loop may take, with --sleep-on-idle, and some more, seconds.
TURN_S = 2.0

T = TypeVar("T")


class SglangEngine:
    """Implements ``Engine`` over a SGLang ``Scheduler``, which must be the only rank.

    The scheduler is touched in its own thread alone, once per turn of its event loop: there requests are admitted, held
    or refused, and what the service asks for is done between two batches. A request that is refused is aborted with
    status 503, which SGLang's server answers to its client.
    """

    name = "sglang"

    def __init__(self, scheduler: Any) -> None:
        """Take over the intake of ``scheduler``, before its event loop runs.

        Raises:
            ConfigurationError: this scheduler cannot be served, and why.
        """
        _check(scheduler)
        self._scheduler = scheduler
        self._messages = importlib.import_module("sglang.srt.managers.io_struct")
        self._closed: tuple[str, int] | None = None  # why, and how many may wait
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        # Of the scheduler's thread alone.
        self._held: list[Any] = []
        self._drains: list[Future[None]] = []
        self._frozen = False
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._thread: threading.Thread | None = None
        self._process_input_requests = scheduler.process_input_requests
        scheduler.process_input_requests = self._turn

    # The engine port.

    def is_alive(self) -> bool:
        """Whether the event loop runs, or has not begun yet, and the device's context works."""
        running = self._thread is None or self._thread.is_alive()
        return running and not self._scheduler.gracefully_exit and ms.status().state != "failed"

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self._closed = (reason, hold)

    def open_admission(self) -> None:
        self._closed = None
        self._submit(lambda: self._thaw() if self._closed is None else None)

    def drain(self, timeout_s: float, mode: DrainMode = "wait") -> None:
        """Bring the scheduler to a stand until `open_admission`.

        With ``keep`` running requests go back to SGLang's waiting queue, and are computed again from their tokens.

        Raises:
            DrainTimeoutError: it took longer; the scheduler goes on as before.
            ValueError: there is no such mode.
        """
        if mode not in get_args(DrainMode):
            raise ValueError(f"unknown drain mode {mode!r}; choose one of {', '.join(get_args(DrainMode))}")
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

        begun = self._submit(begin)
        self._await(begun, max(timeout_s, TURN_S))  # also with no time at all, one turn is looked at
        if begun.cancel():
            raise DrainTimeoutError(timeout_s, self._in_flight())
        begun.result()
        self._await(still, begun_at + timeout_s - time.monotonic())
        if not still.done():
            self._submit(give_up)
            raise DrainTimeoutError(timeout_s, self._in_flight())
        still.result()

    def flush_cache(self) -> None:
        """Forget every cached prefix. Touches no memory that is released.

        Raises:
            DrainTimeoutError: requests are running, which SGLang does not flush under.
        """
        self._do(self._flush)

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """Write buffers back into weights that came back without their content, and forget a lost cache's prefixes.

        The weights themselves are then written by SGLang's own update calls.
        """
        self._do(lambda: self._repair(lost))

    # In the scheduler's thread.

    def _turn(self, received: Sequence[Any]) -> None:
        self._thread = threading.current_thread()
        self._process_input_requests(self._admit(received or ()))
        while self._work:
            future, work = self._work.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        self._end_drains()

    def _end_drains(self) -> None:
        if not (self._drains and self._is_still()):
            return
        drains, self._drains = self._drains, []
        try:
            self._stash()
        except Exception as error:
            for each in drains:
                each.set_exception(error)
        else:
            for each in drains:
                each.set_result(None)

    def _admit(self, received: Sequence[Any]) -> list[Any]:
        """What of ``received`` goes on to the scheduler, and what has waited for that."""
        messages = self._messages
        closed = self._closed
        admitted: list[Any] = []
        if closed is None:
            admitted, self._held = self._held, []
        for request in received:
            if isinstance(request, (messages.BatchTokenizedGenerateReqInput, messages.BatchTokenizedEmbeddingReqInput)):
                requests = list(request)
            elif isinstance(request, (messages.TokenizedGenerateReqInput, messages.TokenizedEmbeddingReqInput)):
                requests = [request]
            else:
                if isinstance(request, messages.AbortReq):
                    self._abort_held(request)
                admitted.append(request)
                continue
            if closed is None:
                admitted.append(request)
                continue
            for each in requests:
                self._turn_away(each, *closed)
        return admitted

    def _turn_away(self, request: Any, reason: str, hold: int) -> None:
        if request.rid.startswith("HEALTH_CHECK"):
            # As SGLang answers it while it is busy: the process is well, whether or not it has its memory.
            self._scheduler.return_health_check_ipcs.append(getattr(request, "http_worker_ipc", None))
            self._scheduler.maybe_send_health_check_signal()
        elif len(self._held) < hold:
            self._held.append(request)
        else:
            self._answer_aborted(request, reason)

    def _abort_held(self, abort: Any) -> None:
        leaving = [each for each in self._held if abort.abort_all or each.rid.startswith(abort.rid)]
        self._held = [each for each in self._held if each not in leaving]
        for each in leaving:
            self._answer_aborted(each)

    def _answer_aborted(self, request: Any, reason: str = "") -> None:
        finished = {"type": "abort", "status_code": HTTPStatus.SERVICE_UNAVAILABLE, "message": reason}
        answer = self._messages.AbortReq(rid=request.rid, finished_reason=finished if reason else None)
        self._scheduler.ipc_channels.send_to_tokenizer.send_output(answer, request)

    def _freeze(self) -> bool:
        """Send what runs back to the waiting queue; whether anything did."""
        if self._is_still():
            return False
        already = self._scheduler._engine_paused
        self._scheduler.pause_generation(self._messages.PauseGenerationReqInput(mode="retract"))
        self._frozen = self._frozen or not already  # what others told SGLang to pause, others continue
        return not already

    def _thaw(self) -> None:
        if self._frozen:
            self._frozen = False
            self._scheduler.continue_generation(self._messages.ContinueGenerationReqInput())

    def _is_still(self) -> bool:
        """Whether no request runs, and none of those that are paused holds a part of the cache."""
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

    def _stash(self) -> None:
        """Copy the model's buffers, which no weight update writes, as long as their memory is there."""
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

    # For the other threads.

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.append((future, work))
        return future

    def _do(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the scheduler's thread, and return what it returns.

        Raises:
            MemsaverError: the event loop ended before.
        """
        future = self._submit(work)
        self._await(future, float("inf"))
        return future.result()

    def _await(self, future: Future[Any], timeout_s: float) -> None:
        """Return once ``future`` is done, or after ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while not wait([future], max(0.0, min(LIVENESS_S, deadline - time.monotonic()))).done:
            self._check_alive()
            if time.monotonic() >= deadline:
                return

    def _check_alive(self) -> None:
        if not self.is_alive():
            raise MemsaverError("SGLang's scheduler does not run any more; restart the engine")

    def _in_flight(self) -> list[str]:
        scheduler = self._scheduler
        running = sorted(request.rid for request in scheduler.collect_inflight_reqs())
        return [*running, *(request.rid for request in list(scheduler.waiting_queue))]


def attach(scheduler: Any, **where: Any) -> Attachment:
    """Serve a SGLang ``Scheduler`` from a thread of its process: call it before ``scheduler.run_event_loop()``.

    Args:
        scheduler: the only rank of an engine that was started with ``--enable-memory-saver``.
        where: as for ``memsaver_server.attach``.

    Raises:
        ConfigurationError: this scheduler cannot be served, or the address not be bound.
    """
    from memsaver_server.attachment import attach as serve

    return serve(SglangEngine(scheduler), **where)


def register() -> None:
    """SGLang's plugin entry point: serve each scheduler of this process at ``MEMSAVER_SGLANG``, where that is set."""
    if not os.environ.get(VARIABLE):
        return
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.run_event_loop", _attached, hooks.HookType.AROUND
    )


def _attached(run_event_loop: Callable[..., None], scheduler: Any) -> None:
    with attach(scheduler, **_address(os.environ[VARIABLE])):
        run_event_loop(scheduler)


def _address(value: str) -> dict[str, Any]:
    host, colon, port = value.rpartition(":")
    if colon and port.isdecimal():
        return {"host": host.strip("[]"), "port": int(port)}
    if "/" in value:
        return {"uds": value}
    raise ConfigurationError(f"{VARIABLE}={value!r} is no address; give HOST:PORT, or the path of a Unix socket")


def _check(scheduler: Any) -> None:
    ranks = scheduler.ps
    mode = getattr(scheduler.disaggregation_mode, "value", scheduler.disaggregation_mode)
    problem = ""
    if ms.enabled() and not scheduler.memory_saver_adapter.enabled:
        problem = "its memory is in no region; start it with --enable-memory-saver"
    elif ms.enabled() and not _is_ours(scheduler.memory_saver_adapter):
        problem = (
            "it uses another torch_memory_saver; install memsaver-torch-memory-saver in the place of that, or call "
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
    """Whether SGLang's adapter holds memsaver's module, which it imports under the name that it knows."""
    module = importlib.import_module(type(adapter).__module__)
    return getattr(getattr(module, "torch_memory_saver", None), "__name__", "").startswith("memsaver_core.")


if TYPE_CHECKING:

    def _is_an_engine(scheduler: Any) -> Engine:
        return SglangEngine(scheduler)
