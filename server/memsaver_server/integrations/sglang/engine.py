"""SGLang as an ``Engine``, and the names of SGLang that this relies on."""

from __future__ import annotations

import dataclasses
import importlib
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from memsaver_core.contract.errors import DrainTimeoutError, MemsaverError, NotResidentError, UnsupportedError
from memsaver_core.contract.requests import DrainMode
from memsaver_core.hibernation.preconditions import register_check
from memsaver_server.engine import check_drain_mode, never
from memsaver_server.engine.limited_pages import LimitedPages
from memsaver_server.engine.tag_selection import released_tags
from memsaver_server.integrations.adapter import engine as base
from memsaver_server.integrations.sglang.page_limit import PageLimit, obstacle
from memsaver_server.integrations.sglang.plugin import QUESTION

#: What a ``Scheduler`` must have: paths of attributes. docs/sglang.md lists the versions that have them.
NAMES = (
    "_engine_paused", "_request_dispatcher", "chunked_req", "disaggregation_mode", "flush_cache", "gracefully_exit",
    "ipc_channels.send_to_tokenizer.send_output", "is_fully_idle", "last_batch", "maybe_send_health_check_signal",
    "memory_saver_adapter", "process_input_requests", "req_to_token_pool.clear", "request_receiver.input_blocker",
    "request_receiver.recv_requests", "return_health_check_ipcs", "running_batch", "server_args",
    "token_to_kv_pool_allocator.clear", "tp_worker.model_runner.model", "tree_cache.reset", "waiting_queue",
    "world_group.cpu_group", "world_group.rank_in_group", "world_group.ranks", "world_group.world_size",
)  # fmt: skip

#: The requests and answers that ``sglang.srt.managers.io_struct`` must have.
MESSAGES = (
    "AbortReq", "BatchTokenizedEmbeddingReqInput", "BatchTokenizedGenerateReqInput", "CheckWeightsReqInput",
    "CheckWeightsReqOutput", "ContinueGenerationReqInput", "FlushCacheReqInput", "FlushCacheReqOutput",
    "GetInternalStateReq", "GetInternalStateReqOutput", "PauseGenerationReqInput", "ReleaseMemoryOccupationReqInput",
    "ReleaseMemoryOccupationReqOutput", "ResumeMemoryOccupationReqInput", "ResumeMemoryOccupationReqOutput",
    "TokenizedEmbeddingReqInput", "TokenizedGenerateReqInput", "UpdateWeightFromDiskReqInput",
    "UpdateWeightFromDiskReqOutput", "UpdateWeightsFromDistributedReqInput", "UpdateWeightsFromDistributedReqOutput",
    "UpdateWeightsFromTensorReqInput", "UpdateWeightsFromTensorReqOutput",
)  # fmt: skip

_OWN = "release by SGLang's own /release_memory_occupation"
_HIERARCHICAL_CACHE = (
    "SGLang's hierarchical cache is in use, with which a hibernated server has hung as it woke up; start it without "
    "--enable-hierarchical-cache"
)

#: How many requests may wait before the first one, which is the warm-up, was admitted.
HELD_BEFORE_WARM_UP = 1024
#: How long a flush waits for requests that are about to end, or that a pause before it is setting aside, seconds.
SETTLING_S = 1.0
#: Requests that read weights. The methods of ``RpcReqInput`` that save the model do so, too.
READS = ("CheckWeightsReqInput", "GetWeightsByNameReqInput", "SendWeightsToRemoteInstanceReqInput")
#: What comes before and after the requests of an update, from 0.5.21 on.
BEGIN, END = "BeginWeightUpdateReqInput", "EndWeightUpdateReqInput"
#: A verification's prompt, of tokens that every vocabulary has; how many are to follow, and in how many seconds.
PROMPT = range(10, 26)
LENGTH = 8
VERIFICATION_S = 60.0


def messages() -> ModuleType:
    return importlib.import_module("sglang.srt.managers.io_struct")


class SglangScheduler(base.Scheduler):
    engine = "SGLang"

    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self._aside: tuple[list[Any], bool] | None = None  # the requests that waited; whether the engine was paused
        self._limit: PageLimit | None = None  # once somebody has asked for it

    @property
    def group(self) -> base.SchedulerGroup:
        return cast(base.SchedulerGroup, self.own.world_group)

    @property
    def parallel(self) -> Any:
        """The object with ``tp_rank``, ``tp_size``, ``pp_rank``, ``pp_size`` and ``dp_size``."""
        if hasattr(self.own, "ps"):  # up to 0.5.20
            return self.own.ps
        return importlib.import_module("sglang.srt.runtime_context").get_parallel()

    def missing(self) -> list[str]:
        draft = ["draft_worker.clear_cache_pool"] if getattr(self.own, "draft_worker", None) else []
        return [
            *base.lacking(self.own, [*NAMES, *draft], "Scheduler"),
            *base.lacking(messages(), MESSAGES, "io_struct"),
        ]

    def obstacles(self, service: bool) -> Iterator[str]:
        own, parallel, adapter = self.own, self.parallel, self.own.memory_saver_adapter
        yield from base.memory_obstacles(adapter.enabled, type(adapter).__module__)
        if getattr(parallel, "attn_dp_size", 1) > 1:
            yield (
                "with data-parallel attention each group of ranks takes requests for itself, while all compute in "
                f"step; {_OWN}"
            )
        if service and parallel.dp_size > 1:
            yield (
                f"it is one of {parallel.dp_size} data-parallel replicas, of which each takes requests for itself, and "
                f"a service would see one; run a server for each replica, or leave MEMSAVER_SGLANG out and {_OWN}, "
                "which memsaver carries out on each"
            )
        if own.world_group.world_size > 1 and getattr(own.server_args, "nnodes", 1) > 1:
            yield f"its ranks are on several hosts; {_OWN}"
        if getattr(own, "mm_receiver", None) is not None:
            yield "it waits for embeddings of another engine's encoder (--language-only), out of the service's sight"
        if getattr(own.server_args, "weight_cache_mode", "off") != "off":
            yield "its weights are in the memory of SGLang's weight cache; start it with --weight-cache-mode off"
        if (mode := getattr(own.disaggregation_mode, "value", own.disaggregation_mode)) != "null":
            yield f"it is the {mode} side of a disaggregated engine"
        if getattr(own, "rust_server", None) is not None:
            yield "requests reach it by SGLang's Rust server; unset SGLANG_RUST_SERVER"

    def take_over(self, loop: base.EventLoop) -> None:
        own, process_own = self.own, self.own.process_input_requests

        def process(requests: list[Any]) -> Any:
            if self._limit is not None:
                self._limit.before_step()
            return process_own(requests)

        own.request_receiver = SimpleNamespace(recv_requests=loop.beginning(own.request_receiver.recv_requests))
        own.process_input_requests = lambda received: loop.process(received or (), process)
        if (updater := getattr(own, "weight_updater", None)) is not None:
            updater.flush_cache = self._flush_after_update
        if getattr(own.server_args, "enable_hierarchical_cache", False):
            register_check(lambda: [_HIERARCHICAL_CACHE])

    def lead(self, loop: base.LeadingLoop) -> base.IdleRest:
        receiver = self.own.request_receiver
        blocker = receiver.input_blocker  # asked between the receipt of requests and their broadcast

        def handle(received: Sequence[Any]) -> list[Any]:
            return loop.handle(blocker.handle(received) if blocker is not None else received)

        self.own.request_receiver = dataclasses.replace(receiver, input_blocker=SimpleNamespace(handle=handle))
        sockets = [getattr(receiver, name, None) for name in ("recv_from_tokenizer", "recv_from_rpc")]
        idle = base.IdleRest(sockets, self.has_nothing_to_do, self.parallel.pp_size)
        if (sleeper := getattr(self.own, "idle_sleeper", None)) is not None and idle.poller is not None:
            sleeper.poller = idle.poller  # so that `wake`, too, ends the sleep of --sleep-on-idle
        return idle

    def is_ending(self) -> bool:
        return bool(self.own.gracefully_exit)

    def is_still(self) -> bool:
        """Return whether no request runs, no paused one holds a part of the cache, and no part is being copied."""
        own = self.own
        idle = own.is_fully_idle() or (
            own._engine_paused and own.running_batch.is_empty() and own.last_batch is None and own.chunked_req is None
        )
        return bool(idle) and not self._looks_at_copies()

    def has_nothing_to_do(self) -> bool:
        """See ``Scheduler``. It is cheap while requests run."""
        idle = self.own._engine_paused or (self.own.running_batch.is_empty() and self.own.is_fully_idle())
        return bool(idle) and not self._looks_at_copies()

    def _looks_at_copies(self) -> bool:
        """Return whether the event loop waits for copies of the hierarchical cache. Unless paused it waits with the
        interpreter's lock held; in a hibernated process that would never end."""
        copies = getattr(self.own.tree_cache, "cache_controller", None)
        under_way = getattr(copies, "ack_write_queue", None) or getattr(copies, "ack_load_queue", None)
        return not self.own._engine_paused and bool(under_way)

    def in_flight(self) -> list[str]:
        running = sorted({request.rid for request in self.running()})
        return [*running, *(request.rid for request in list(self.own.waiting_queue) if request.rid not in running)]

    def running(self) -> Iterable[Any]:
        """Return the requests in the batches in progress."""
        own = self.own
        if hasattr(own, "collect_inflight_reqs"):  # from 0.5.19 on
            return cast(Iterable[Any], own.collect_inflight_reqs())
        several = self.parallel.pp_size > 1
        batches = [*own.running_mbs, *own.mbs] if several else [own.running_batch, own.last_batch]
        return [request for batch in batches if batch is not None for request in batch.reqs]

    def models(self) -> list[Any]:
        return [runner.model for runner in self._runners()]

    def pools(self) -> list[Any]:
        """Return the pools of pages: the model's, and those of a draft model, which has the same pages."""
        return [runner.token_to_kv_pool for runner in self._runners()]

    def _runners(self) -> list[Any]:
        draft: Any = getattr(self.own, "draft_worker", None)
        runners = [self.own.tp_worker.model_runner]
        if hasattr(draft, "draft_model_runner"):
            return [*runners, draft.draft_model_runner]
        return runners + (getattr(getattr(draft, "draft_worker", None), "draft_runners", None) or [])

    def pages(self, name: str, *arguments: Any) -> Any:
        """Call a method of this rank's ``PageLimit``."""
        if self._limit is None:
            self._limit = PageLimit(self.own, self.running, self.pools())
        return getattr(self._limit, name)(*arguments)

    def back_pages(self, pages: int) -> None:
        self.pages("back", pages)

    def flush(self) -> None:
        own = self.own
        if own.is_fully_idle():
            own.flush_cache(empty_cache=False)
            return
        if not self.is_still():
            raise DrainTimeoutError(0, self.in_flight())
        # flush_cache() refuses while requests wait. Those that wait now were retracted, and hold nothing of the cache.
        own.tree_cache.reset()
        own.req_to_token_pool.clear()
        own.token_to_kv_pool_allocator.clear()
        if hasattr(own.req_to_token_pool, "reset_aux_cache_allocator"):  # from 0.5.19 on
            own.req_to_token_pool.reset_aux_cache_allocator()
        if draft_worker := getattr(own, "draft_worker", None):
            draft_worker.clear_cache_pool()

    def _flush_after_update(self, empty_cache: bool = True) -> bool:
        """Replaces SGLang's flush after an update of weights, whose failure ends the process."""
        if self.own.is_fully_idle() or not self.is_still():
            return bool(self.own.flush_cache(empty_cache=empty_cache))
        self.flush()
        return True

    def set_aside(self) -> None:
        """Make room for the verification prompt: no request waits, no prefix is cached."""
        self.flush()
        self._aside = (list(self.own.waiting_queue), self.own._engine_paused)
        self.own.waiting_queue[:] = []
        self.own._engine_paused = False

    def bring_back(self) -> None:
        """Undo ``set_aside``, if that was done; forget the prompt's prefixes, unless it still runs."""
        if self._aside is None:
            return
        self.own.waiting_queue[:], self.own._engine_paused = self._aside
        self._aside = None
        if self.is_still():
            self.flush()


class SglangEngine(LimitedPages, base.LoopEngine):
    """The engine over a ``Scheduler``. Rank 0 admits, holds or refuses requests. A refused one is aborted with status
    503, which SGLang's server returns to the client. In SGLang itself, a release ends the process if a request runs,
    and a resume if nothing is released; a weight update or a continuation touches memory that is released."""

    name = "sglang"
    scheduler_class = SglangScheduler
    scheduler: SglangScheduler

    def __init__(self, scheduler: SglangScheduler) -> None:
        own = self._own = scheduler.own
        self._messages = messages()
        self._closed: tuple[str, int] | None = None  # the reason, and how many requests may be held
        # Used in the scheduler's thread alone.
        self._held: list[Any] = []
        # The first request is the warm-up of SGLang's server, which ends the server if it is refused.
        self._warm = getattr(own.server_args, "skip_server_warmup", True)
        self._frozen = False
        self._continuation: Any = None  # a request to continue generation that came while admission was closed
        self._prompt: VerificationPrompt | None = None
        self._dispatcher = own._request_dispatcher
        own._request_dispatcher = self._dispatch
        super().__init__(scheduler)

    @property
    def model_name(self) -> str:
        return str(getattr(self._own.server_args, "model_path", ""))

    # Methods of ``Engine``.

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self._closed = (reason, hold)

    def open_admission(self) -> None:
        self._closed = None
        self.submit(self._opened)

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        """Bring every rank's scheduler to a standstill until ``open_admission``. With ``keep``, running requests go
        back to SGLang's waiting queue, and are computed again from their tokens; so are, in any mode, those that SGLang
        has paused in place, which cannot be aborted. Raises UnsupportedError for ``keep`` with pipeline parallelism."""
        check_drain_mode(mode)
        if mode == "keep" and self.scheduler.parallel.pp_size > 1:
            raise UnsupportedError(
                "SGLang cannot set requests aside with pipeline parallelism: its pause reaches one of the batches in "
                "the pipeline alone; release with the mode wait or abort"
            )
        froze = False

        def begin() -> None:
            nonlocal froze
            if mode == "keep" or self._own._engine_paused:
                froze = self._freeze()
            if mode == "abort":
                self.send(self._messages.AbortReq(rid="", abort_all=True))

        self.when_still(timeout_s, begin=begin, undo=lambda: self._thaw() if froze else None, given_up=given_up)
        self.run_on_all("save_buffers")

    def verify_tokens(self) -> list[int]:
        """See ``VerifiableEngine``. The tokens are computed on all ranks, without a cached prefix. Raises
        UnsupportedError if the engine generates no tokens, MemsaverError if it takes longer than ``VERIFICATION_S``."""
        if not getattr(self._own, "is_generation", True):
            raise UnsupportedError("the engine generates no tokens (an embedding model); leave 'verify' out")
        prompt = VerificationPrompt(self._own)
        try:
            self.run_on_all("set_aside")
            self._prompt = prompt
            self.send(prompt.request)
            if not self.is_done(prompt.tokens, VERIFICATION_S):
                self.send(self._messages.AbortReq(rid=prompt.request.rid))
                raise MemsaverError(f"the verification prompt was not computed in {VERIFICATION_S:g} s")
            return prompt.tokens.result()
        finally:
            self._prompt = None
            with suppress(DrainTimeoutError):  # requests that were set aside continue beside the prompt
                self.when_still(base.ITERATION_S)
            self.run_on_all("bring_back")

    # Methods of ``LimitedPages``.

    def ask_pages(self, name: str, *arguments: Any) -> dict[str, Any]:
        if reason := obstacle(self._own, self.scheduler.parallel.pp_size, self.scheduler.pools()):
            return {"obstacle": reason}
        if name in ("limit", "keep", "preempt"):
            self.run_on_all("pages", name, *arguments)
            return {"result": None}
        asked = self.submit(partial(self.scheduler.pages, name))
        if not self.is_done(asked, base.COMMAND_S):
            raise base.LateError(f"SGLang's scheduler did not come to its next iteration in {base.COMMAND_S:g} s")
        return {"result": asked.result()}

    def back_pages(self, pages: int, before: int) -> None:
        if isinstance(self.memory, base.SchedulerMemory):
            self.memory.resize(pages, before)
        else:
            self.run("pages", "back", pages)

    # In the scheduler's thread: requests.

    def take(self, received: Sequence[Any]) -> list[Any]:
        received = super().take(received)
        messages = self._messages
        batches = (messages.BatchTokenizedGenerateReqInput, messages.BatchTokenizedEmbeddingReqInput)
        work = (*batches, messages.TokenizedGenerateReqInput, messages.TokenizedEmbeddingReqInput)
        closed = self._closed
        admitted: list[Any] = []
        if closed is None:
            admitted, self._held = self._held, []
        for request in received:
            if isinstance(request, messages.AbortReq):
                self._abort_held(request)
            if closed is None or not isinstance(request, work):
                admitted.append(request)
                continue
            reason, hold = closed
            for each in list(request) if isinstance(request, batches) else [request]:
                self._hold_or_refuse(each, reason, hold if self._warm else HELD_BEFORE_WARM_UP)
        self._warm = self._warm or any(isinstance(each, work) for each in admitted)
        return admitted

    def _hold_or_refuse(self, request: Any, reason: str, hold: int) -> None:
        if request.rid.startswith("HEALTH_CHECK"):
            # The answer that SGLang gives while it is busy: the process is healthy, with or without its memory.
            self._own.return_health_check_ipcs.append(getattr(request, "http_worker_ipc", None))
            self._own.maybe_send_health_check_signal()
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
        self._own.ipc_channels.send_to_tokenizer.send_output(answer, request)

    def after(self) -> None:
        if (prompt := self._prompt) is not None:
            prompt.note()
        super().after()

    def _opened(self) -> None:
        if self._closed is None:
            self._thaw()
            if self._continuation is not None:
                self.send(self._continuation)
                self._continuation = None

    def _freeze(self) -> bool:
        """Send running requests back to the waiting queue; return whether this paused the engine."""
        if self.scheduler.is_still():
            return False
        already = self._own._engine_paused
        self.send(self._messages.PauseGenerationReqInput(mode="retract"))
        self._frozen = self._frozen or not already  # if a caller has paused generation, that caller continues it
        return not already

    def _thaw(self) -> None:
        if self._frozen:
            self._frozen = False
            self.send(self._messages.ContinueGenerationReqInput())

    # In the scheduler's thread: SGLang's own calls.

    def _takes(self, request: Any) -> bool:
        name = type(request).__name__
        if name == "GetInternalStateReq" and request.rid == QUESTION:
            state = {"closed": self._closed is not None, "still": self.scheduler.is_still()}
            self._send(self._messages.GetInternalStateReqOutput(internal_state=state), request)
            return True
        if name == "FlushCacheReqInput" and (self._closed is not None or not self._own.is_fully_idle()):
            return self._in_thread(self._flush, request)
        if name in READS or (name == "RpcReqInput" and request.method.startswith("save_")):
            status = self.memory.status()
            if status.hibernated or "weights" in released_tags(status):
                self._answer(request, NotResidentError.of("weights"))
                return True
        if name in (BEGIN, END):
            return self._in_thread(self._update, request)
        if name == "ContinueGenerationReqInput" and self._closed is not None:
            self._continuation = request
            return True
        if name == "PauseGenerationReqInput":
            self._continuation = None
            self._frozen = False  # the caller that pauses is the one that continues
        return super()._takes(request)

    def _dispatch(self, request: Any) -> Any:
        """Replaces the scheduler's ``_request_dispatcher``, which returns the answer to ``request``, or None."""
        name = type(request).__name__
        answered = self._updates.pop(base.answer_to(request), None)
        try:
            output = self._dispatcher(request)
        except BaseException as error:
            if answered is not None:
                answered.set_exception(error)
            raise
        if answered is not None:
            if name in (BEGIN, END) and output.success:
                self.unwritten_weights = ("all of an update that has not ended",) if name == BEGIN else ()
            answered.set_result(output)
        return output

    # In a thread for each call.

    def _answer(self, request: Any, error: BaseException | None) -> None:
        name = base.answer_to(request)
        kind = getattr(self._messages, name)
        if "MemoryOccupation" in name:
            output = kind()
            if error is not None:
                # This answer has no field for a failure, so an unused field carries it; ``plugin`` raises it.
                output.rid = f"{getattr(error, 'status', 500)} {error}"
        elif name == "GetWeightsByNameReqOutput":
            output = kind(parameter=None)  # it has no field for a failure either; SGLang answers None as one
        else:
            output = kind(success=error is None, message=str(error or ""))
        self._send(output, request)

    def _send(self, output: Any, request: Any) -> None:
        channels = self._own.ipc_channels
        if type(request).__name__ == "RpcReqInput":
            self.submit(partial(self._messages.sock_send, channels.recv_from_rpc, output))
        else:
            self.submit(partial(channels.send_to_tokenizer.send_output, output, request))

    def _flush(self, request: Any) -> None:
        """Flush the cache. SGLang's own flush fails while a pause sets requests aside, and just after an answer."""
        failed: Exception | None = None
        try:
            self.when_still(max(SETTLING_S, getattr(request, "timeout_s", None) or 0))
            self.flush_cache()
        except Exception as error:
            failed = error
        self._answer(request, failed)

    def _write(self, request: Any, answered: Future[Any]) -> None:
        write = partial(super()._write, request, answered)
        if getattr(request, "flush_cache", False):
            # SGLang's flush after it would end the process if a request ran, as one may just after the last answer.
            self.when_still(self._settings.drain_timeout_s, write)
        else:
            write()


class VerificationPrompt:
    """One greedy computation of the tokens that follow ``PROMPT``: send the scheduler ``request``, await ``tokens``."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        sampling = importlib.import_module("sglang.srt.sampling.sampling_params")
        parameters = sampling.SamplingParams(max_new_tokens=LENGTH, temperature=0.0, ignore_eos=True)
        parameters.normalize(None)
        kind = messages().TokenizedGenerateReqInput
        values = {
            # SGLang drops the answer to a health check if no client waits for it.
            "rid": f"HEALTH_CHECK_memsaver_{uuid.uuid4().hex}", "input_text": None, "input_ids": array("q", PROMPT),
            "input_embeds": None, "mm_inputs": None, "token_type_ids": None, "sampling_params": parameters,
            "return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "token_ids_logprob": None,
            "stream": False,
        }  # fmt: skip
        fields = getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__
        self.request = kind(**{name: value for name, value in values.items() if name in fields})
        self.tokens: Future[list[int]] = Future()
        self._running: Any = None

    def note(self) -> None:
        """Find the request, and note its tokens once it has ended. Called in the scheduler's thread."""
        if self._running is None:
            waiting = [each for each in self._scheduler.waiting_queue if each.rid == self.request.rid]
            self._running = waiting[0] if waiting else None
        elif self._running.finished() and not self.tokens.done():
            self.tokens.set_result([int(token) for token in self._running.output_ids])
