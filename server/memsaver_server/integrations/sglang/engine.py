"""SGLang as an ``Engine``, and the names of SGLang that this relies on."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property, partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

from memsaver_core.compat.loading import LOAD_FORMAT
from memsaver_core.contract.errors import DrainTimeoutError, MemsaverError, NotResidentError, UnsupportedError
from memsaver_core.contract.requests import DrainMode
from memsaver_core.hibernation.preconditions import register_check
from memsaver_server.engine import check_drain_mode, never
from memsaver_server.engine.limited_pages import LimitedPages
from memsaver_server.engine.tag_selection import released_tags
from memsaver_server.engine.verification import LENGTH, PROMPT
from memsaver_server.integrations.adapter import engine as base
from memsaver_server.integrations.sglang.admission import RankAdmission
from memsaver_server.integrations.sglang.page_limit import SchedulerPages, obstacle
from memsaver_server.integrations.sglang.plugin import QUESTION, REPLICAS

#: What a ``Scheduler`` must have: paths of attributes. docs/sglang.md lists the versions that have them.
NAMES = (
    "_engine_paused", "_request_dispatcher", "chunked_req", "disaggregation_mode", "flush_cache", "gracefully_exit",
    "ipc_channels.send_to_tokenizer.send_output", "is_fully_idle", "last_batch", "maybe_send_health_check_signal",
    "memory_saver_adapter", "process_input_requests", "req_to_token_pool.clear", "request_receiver.input_blocker",
    "request_receiver.recv_requests", "return_health_check_ipcs", "running_batch", "server_args",
    "token_to_kv_pool_allocator.clear", "tp_worker.model_runner.model", "tree_cache.reset", "waiting_queue",
    "weight_updater.flush_cache", "weight_updater.offload_tags", "world_group.cpu_group", "world_group.rank_in_group",
    "world_group.ranks", "world_group.world_size",
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

#: A tag that is in SGLang's set of released tags while admission is closed: as long as that set is not empty, SGLang's
#: ranks agree on batches without the device.
CLOSED = "memsaver"
#: How long a flush waits for requests that are about to end, or that a pause before it is setting aside, seconds.
SETTLING_S = 1.0
#: SGLang's option by which each group of ranks with data-parallel attention receives commands by itself.
LOCAL = "enable_dp_attention_local_control_broadcast"
#: What a disaggregated scheduler has for transfers of pages.
QUEUES = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue", "disagg_decode_transfer_queue")
#: Requests that read weights. The methods of ``RpcReqInput`` that save the model do so, too.
READS = ("CheckWeightsReqInput", "GetWeightsByNameReqInput", "SendWeightsToRemoteInstanceReqInput")
#: What comes before and after the requests of an update, from 0.5.21 on.
BEGIN, END = "BeginWeightUpdateReqInput", "EndWeightUpdateReqInput"
FROM_DISK = "UpdateWeightFromDiskReqInput"
#: The requests of updates that can be carried out while the weights are released. Those of other kinds need device
#: memory or communicators.
ASLEEP = (FROM_DISK, "UpdateWeightsFromTensorReqInput", BEGIN, END)
#: A limit for the tokens of a verification, seconds.
VERIFICATION_S = 60.0


def messages() -> ModuleType:
    return importlib.import_module("sglang.srt.managers.io_struct")


class SglangScheduler(base.Scheduler):
    engine = "SGLang"

    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self._messages = messages()
        self._aside: tuple[list[Any], bool] | None = None  # the requests that waited; whether the engine was paused
        self._limit: SchedulerPages | None = None  # once somebody has asked for it
        self.admission = RankAdmission(own, self._messages)
        self._is_first = False
        self._deregistered: list[Any] = []  # queues of transfers

    @property
    def parallel(self) -> Any:
        """The object with ``tp_rank``, ``tp_size``, ``pp_rank``, ``pp_size`` and ``dp_size``."""
        if hasattr(self.own, "ps"):  # up to 0.5.20
            return self.own.ps
        return importlib.import_module("sglang.srt.runtime_context").get_parallel()

    @cached_property
    def topology(self) -> base.Topology:
        group, parallel, settings = self.own.world_group, self.parallel, self.own.server_args
        known: dict[str, Any] = {"several_receive": self._several_attend or parallel.dp_size > 1}
        if parallel.dp_size > 1 and not self._several_attend:
            folder = os.environ.get(REPLICAS, "")
            known |= {"replica": parallel.dp_rank, "replicas": parallel.dp_size, "folder": folder}
        if getattr(settings, "nnodes", 1) > 1 and group.world_size > 1:
            known["host"] = urlsplit(f"//{settings.dist_init_addr}").hostname or ""
        return base.Topology(group.world_size, group.ranks, group.rank_in_group, group.cpu_group, **known)

    @property
    def _several_attend(self) -> bool:
        """Whether attention is data-parallel: each group of ranks receives requests, and all compute in step."""
        return bool(getattr(self.parallel, "attn_dp_size", 1) > 1)

    def missing(self) -> list[str]:
        draft = ["draft_worker.clear_cache_pool"] if getattr(self.own, "draft_worker", None) else []
        return [
            *base.lacking(self.own, [*NAMES, *draft], "Scheduler"),
            *base.lacking(messages(), MESSAGES, "io_struct"),
        ]

    def obstacles(self) -> Iterator[str]:
        own, adapter = self.own, self.own.memory_saver_adapter
        yield from base.memory_obstacles(adapter.enabled, type(adapter).__module__)
        context = sys.modules.get("sglang.srt.runtime_context")  # which SGLang's models may change
        if any(getattr(each, LOCAL, False) for each in (own.server_args, context and context.get_parallel())):
            yield f"its ranks do not receive commands together; start it without --{LOCAL.replace('_', '-')}"
        if getattr(own.server_args, "elastic_ep_backend", None) is not None:
            yield "its ranks come and go; start it without --elastic-ep-backend"
        if not hasattr(own, "ps") and self._several_attend and self.parallel.dp_size > 1:
            yield "its replicas have data-parallel attention each; start it with either --dp or --attn-dp-size"
        if self.topology.replicas > 1 and not self.topology.folder:
            yield f"its replicas cannot find each other: {REPLICAS} is not set; start them by SGLang's own server"
        if self.topology.host and not base.key():
            yield "its ranks are on several hosts; set MEMSAVER_API_KEY, the same on each of them"
        if getattr(own.server_args, "weight_cache_mode", "off") != "off":
            yield "its weights are in the memory of SGLang's weight cache; start it with --weight-cache-mode off"
        if self._transferring and not hasattr(self._transferring[0].kv_manager, "deregister_buffer_to_engine"):
            backend = getattr(own.server_args, "disaggregation_transfer_backend", "")
            if backend != "fake":
                yield f"{backend} cannot let go of the cache's memory; start it with another transfer backend"
        if getattr(own, "rust_server", None) is not None:
            yield "requests reach it by SGLang's Rust server; unset SGLANG_RUST_SERVER"

    def take_over(self, loop: base.EventLoop) -> None:
        own, process_own = self.own, self.own.process_input_requests

        def process(requests: list[Any]) -> Any:
            for each in requests:
                if isinstance(each, self._messages.AbortReq):
                    self.admission.abort_held(each)
            if self._limit is not None:
                self._limit.before_step()
            return process_own(requests)

        self._is_first = isinstance(loop, SglangEngine)
        receives = getattr(own.request_receiver, "recv_from_tokenizer", None) is not None
        if receives and not isinstance(loop, base.LeadingLoop):
            self._receive_by(self.admission.admit)
        dispatch = own._request_dispatcher
        own._request_dispatcher = lambda request: self._answer_state(request) or self._note_update(dispatch(request))
        own.request_receiver = SimpleNamespace(
            recv_requests=partial(loop.beginning, own.request_receiver.recv_requests)
        )
        own.process_input_requests = lambda received: loop.process(received or (), process)
        own.weight_updater.flush_cache = self._flush_after_update
        if getattr(own.server_args, "enable_hierarchical_cache", False):
            hangs = "SGLang's hierarchical cache is in use, with which a hibernated server has hung as it woke up"
            register_check(lambda: [f"{hangs}; start it without --enable-hierarchical-cache"])
        backend = getattr(own.server_args, "disaggregation_transfer_backend", "")
        if self.disaggregated and backend != "fake":
            register_check(lambda: [f"{backend} holds memory of the device for transfers to other engines"])

    def lead(self, loop: base.LeadingLoop) -> base.IdleRest:
        receiver = self.own.request_receiver
        self._receive_by(loop.handle)
        sockets = [getattr(receiver, name, None) for name in ("recv_from_tokenizer", "recv_from_rpc")]
        if self._several_attend:  # others wait for this rank's broadcast: it may not rest while they receive requests
            sockets = [None]
        idle = base.IdleRest(sockets, self.has_nothing_to_do, self.parallel.pp_size)
        if (sleeper := getattr(self.own, "idle_sleeper", None)) is not None and idle.poller is not None:
            sleeper.poller = idle.poller  # so that `wake`, too, ends the sleep of --sleep-on-idle
        return idle

    def _receive_by(self, handle: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        """Have SGLang broadcast what ``handle`` returns for what this rank received."""
        receiver = self.own.request_receiver
        blocker = receiver.input_blocker  # asked between the receipt of requests and their broadcast

        def handle_unblocked(received: Sequence[Any]) -> list[Any]:
            return list(handle(blocker.handle(received) if blocker is not None else received))

        blocking = SimpleNamespace(handle=handle_unblocked)
        self.own.request_receiver = dataclasses.replace(receiver, input_blocker=blocking)

    def admit(self, received: Sequence[Any]) -> Sequence[Any]:
        """See ``Scheduler``. SGLang sends the same commands to every replica. This one carries out those that the first
        replica relays, once the service has let them pass. Only aborts are taken directly: a relayed one could come
        before its request."""
        return self.admission.admit([each for each in received if self.is_routed(each)])

    def is_routed(self, request: Any) -> bool:
        """Return whether SGLang itself sends ``request`` to where it is carried out, so that it is not relayed."""
        return self.admission.is_work(request) or isinstance(request, self._messages.AbortReq)

    def _answer_state(self, request: Any) -> Any:
        """Return the answer to ``QUESTION``, else None."""
        if type(request).__name__ != "GetInternalStateReq" or request.rid != QUESTION:
            return None
        state = {"closed": self.admission.closed is not None, "still": self.is_still()}
        return self._messages.GetInternalStateReqOutput(internal_state=state)

    def _note_update(self, output: Any) -> Any:
        if type(output).__name__.replace("ReqOutput", "ReqInput") in ASLEEP:
            self.update_failure = "" if output.success else output.message
        return output

    def made_on_device(self) -> str:
        """Return what SGLang computes from weights that it has loaded, or an empty string."""
        runner = self.own.tp_worker.model_runner
        derived = "derived weights" if hasattr(runner.model, "post_load_weights") else ""
        return getattr(getattr(runner, "model_config", None), "quantization", None) or derived

    def close(self, reason: str, hold: int) -> None:
        """Close admission on this rank; on the first one ``close_admission`` has done so."""
        if not self._is_first:
            self.admission.closed = (reason, hold)
        self.own.weight_updater.offload_tags.add(CLOSED)

    def open(self) -> None:
        if not self._is_first:
            self.admission.closed = None
        for queue in self._deregistered:
            queue.resume_memory_occupation()
        self._deregistered = []
        self.own.weight_updater.offload_tags.discard(CLOSED)

    def answer(self, output: Any, request: Any) -> None:
        """Answer one of SGLang's own calls: it awaits an answer of each rank that receives requests."""
        self.own.ipc_channels.send_to_tokenizer.send_output(output, request)

    @property
    def disaggregated(self) -> bool:
        """Whether it only prefills, or only decodes. Pages then go to, or come from, another engine."""
        mode = self.own.disaggregation_mode
        return bool(getattr(mode, "value", mode) != "null")

    @property
    def _transferring(self) -> list[Any]:
        """The queues of requests whose pages are sent or received. The first has ``kv_manager``, which transfers."""
        return [queue for name in QUEUES if (queue := getattr(self.own, name, None)) is not None]

    def save_buffers(self) -> None:
        """See ``Scheduler``. Also has the cache's memory deregistered, as SGLang's own release does."""
        super().save_buffers()
        if not self._deregistered:
            self._deregistered = self._transferring
            for queue in self._deregistered:
                queue.release_memory_occupation()

    def is_ending(self) -> bool:
        return bool(self.own.gracefully_exit)

    def is_still(self) -> bool:
        """Return whether no request runs, no paused one holds a part of the cache, and no part is being copied."""
        own = self.own
        idle = own.is_fully_idle() or (
            own._engine_paused
            and not self.disaggregated
            and own.running_batch.is_empty()
            and own.last_batch is None
            and own.chunked_req is None
        )
        return bool(idle) and not self._looks_at_copies() and not self._embedding()

    def has_nothing_to_do(self) -> bool:
        """See ``Scheduler``. It is cheap while requests run."""
        idle = self.own._engine_paused or (self.own.running_batch.is_empty() and self.own.is_fully_idle())
        waits = self._looks_at_copies() or self._embedding() or self.admission.has_admissible
        return bool(idle) and not waits

    def _embedding(self) -> list[str]:
        """Return the requests that wait for embeddings of another engine's encoder (``--language-only``)."""
        return [each.rid for each in list(getattr(getattr(self.own, "mm_receiver", None), "waiting_list", ()))]

    def _looks_at_copies(self) -> bool:
        """Return whether the event loop waits for copies of the hierarchical cache. Unless paused it waits with the
        interpreter's lock held; in a hibernated process that would never end."""
        copies = getattr(self.own.tree_cache, "cache_controller", None)
        under_way = getattr(copies, "ack_write_queue", None) or getattr(copies, "ack_load_queue", None)
        return not self.own._engine_paused and bool(under_way)

    def in_flight(self) -> list[str]:
        queues: list[Iterable[Any]] = [getattr(queue, "queue", queue) for queue in self._transferring]
        queues.append(getattr(self.own, "disagg_prefill_inflight_queue", None) or ())
        transferred = [getattr(each, "req", each).rid for queue in queues for each in list(queue)]
        running = sorted({request.rid for request in self.running()})
        waiting = [request.rid for request in list(self.own.waiting_queue)]
        return list(dict.fromkeys([*running, *waiting, *transferred, *self._embedding()]))

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
        """Call a method of this rank's ``SchedulerPages``."""
        if self._limit is None:
            self._limit = SchedulerPages(self.own, self.running, self.pools())
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
    """The engine over a ``Scheduler``. Each rank that receives requests has a ``RankAdmission``. In SGLang itself, a
    release ends the process if a request runs, and a resume if nothing is released; a weight update or a continuation
    touches memory that is released."""

    scheduler_class = SglangScheduler
    scheduler: SglangScheduler

    def __init__(self, scheduler: SglangScheduler) -> None:
        own = self._own = scheduler.own
        self._messages = messages()
        self._admission = scheduler.admission
        self.model_name = str(getattr(own.server_args, "model_path", ""))
        # Used in the scheduler's thread alone.
        self._frozen = False
        self._continuation: Any = None  # a request to continue generation that came while admission was closed
        self._prompt: VerificationPrompt | None = None
        self._version: str | None = None  # as the parts of an update name it
        self._dispatcher = own._request_dispatcher
        own._request_dispatcher = self._dispatch
        super().__init__(scheduler)

    # Methods of ``Engine``.

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self._admission.closed = (reason, hold)
        self.post("close", reason, hold)

    def open_admission(self) -> None:
        if self.scheduler.topology.several_receive:  # a client whose resume is answered is not refused by another rank
            with suppress(MemsaverError):  # the ranks have failed: their watch reports it
                self.run_on_all("open")
        else:
            self.post("open")
        self._admission.closed = None
        self.submit(self._opened)

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        """Bring every rank's scheduler to a standstill until ``open_admission``. With ``keep``, running requests go
        back to SGLang's waiting queue, and are computed again from their tokens; so are, in any mode, those that SGLang
        has paused in place, which cannot be aborted. Raises UnsupportedError for ``keep`` with pipeline parallelism."""
        check_drain_mode(mode)
        if mode == "keep" and self.scheduler.disaggregated:
            raise UnsupportedError(
                "a disaggregated engine cannot set requests aside: their pages are another engine's, too; release with "
                "the mode wait or abort"
            )
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
        if self.scheduler.disaggregated:
            raise UnsupportedError("a disaggregated engine computes no request by itself; leave 'verify' out")
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
        if self.scheduler.disaggregated:
            return {"obstacle": "other engines write its pages (--disaggregation-mode)"}
        if self.scheduler.topology.several_receive:
            return {"obstacle": "its replicas use different pages of their caches (--dp, --enable-dp-attention)"}
        if reason := obstacle(self._own, self.scheduler.parallel.pp_size, self.scheduler.pools()):
            return {"obstacle": reason}
        if name in ("limit", "keep", "preempt"):
            self.run_on_all("pages", name, *arguments)
            if name != "keep":
                return {"result": None}
            name = "read"
        asked = self.submit(partial(self.scheduler.pages, name))
        if not self.is_done(asked, base.COMMAND_S):
            raise base.LateError(f"SGLang's scheduler did not reach its next iteration in {base.COMMAND_S:g} s")
        return {"result": asked.result()}

    def back_pages(self, pages: int, before: int) -> None:
        if isinstance(self.memory, base.SchedulerMemory):
            self.memory.resize(pages, before)
        else:
            self.run("pages", "back", pages)

    # In the scheduler's thread: requests.

    def take(self, received: Sequence[Any]) -> list[Any]:
        admitted = self._admission.admit(super().take(received))
        for each in admitted:
            if not self.scheduler.is_routed(each):
                self.relay(each)
        return admitted

    def after(self) -> None:
        if (prompt := self._prompt) is not None:
            prompt.note()
        super().after()

    def _opened(self) -> None:
        if not self._admission.closed:
            self._thaw()
            if self._continuation is not None:
                self.send(self._continuation)
                self._continuation = None

    def _freeze(self) -> bool:
        """Send running requests back to the waiting queue; return whether this paused the engine."""
        if self.scheduler.is_still() and not self.scheduler.topology.several_receive:
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
        busy = self._admission.closed or self.scheduler.topology.several_receive or not self._own.is_fully_idle()
        if name == "FlushCacheReqInput" and busy:
            return self._in_thread(self._flush, request)
        if name in READS or (name == "RpcReqInput" and request.method.startswith("save_")):
            status = self.memory.status()
            if status.hibernated or "weights" in released_tags(status):
                self._answer(request, NotResidentError.of("weights"))
                return True
        if name in (BEGIN, END):
            return self._in_thread(self._update, request)
        if name == "ContinueGenerationReqInput" and self._admission.closed:
            self._continuation = request
            return True
        if name == "PauseGenerationReqInput":
            self._continuation = None
            self._frozen = False  # the caller that pauses is the one that continues
        return super()._takes(request)

    def _dispatch(self, request: Any) -> Any:
        """Replaces the scheduler's ``_request_dispatcher``, which returns the answer to ``request``; None if that comes
        later, as with an update."""
        name = type(request).__name__
        answered = self._updates.pop(base.answer_to(request), None)
        try:
            output = self._dispatcher(request)
        except BaseException as error:
            if answered is not None:
                answered.set_exception(error)
            raise
        if answered is not None:
            named = super().version_after(request) or (self._version if self.unwritten_weights else None)
            self._version = named if output.success and name != BEGIN else None
            if name in (BEGIN, END) and output.success:
                self.unwritten_weights = ("all of an update that has not ended",) if name == BEGIN else ()
            answered.set_result(output)
            return None
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
        if type(request).__name__ == "RpcReqInput":
            self.submit(partial(self._messages.sock_send, self._own.ipc_channels.recv_from_rpc, output))
        elif self.scheduler.topology.several_receive:
            self.post("answer", output, request)
        else:
            self._reply(request, output)

    def _reply(self, request: Any, output: Any) -> None:
        self.submit(partial(self.scheduler.answer, output, request))

    def _flush(self, request: Any) -> None:
        """Flush the cache. SGLang's own flush fails while a pause sets requests aside, and just after an answer."""
        self.when_still(max(SETTLING_S, getattr(request, "timeout_s", None) or 0))
        self.flush_cache()
        self._answer(request, None)

    def version_after(self, request: Any) -> str | None:
        """See ``LoopEngine``. END has the version that the requests since BEGIN have named."""
        return self._version if type(request).__name__ == END else super().version_after(request)

    def path_of(self, request: Any) -> str | None:
        """See ``LoopEngine``. Of load formats those that load all weights as they are."""
        from_files = type(request).__name__ == FROM_DISK and request.load_format in ("auto", LOAD_FORMAT)
        return str(request.model_path) if from_files else None

    def can_write_asleep(self, request: Any) -> bool:
        """See ``LoopEngine``. Raises UnsupportedError if weights that are released are computed on the device."""
        if type(request).__name__ not in ASLEEP or getattr(request, "recapture_cuda_graph", False):
            return False
        if "weights" in released_tags(self.memory.status()) and (made := self.scheduler.made_on_device()):
            raise UnsupportedError(
                f"SGLang computes {made} on the device, so these weights cannot be written while they are released; "
                "resume them first, and update then"
            )
        return True

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
        self.request = messages().TokenizedGenerateReqInput(
            # SGLang drops the answer to a health check if no client waits for it.
            rid=f"HEALTH_CHECK_memsaver_{uuid.uuid4().hex}", input_text=None, input_ids=array("q", PROMPT),
            input_embeds=None, mm_inputs=None, token_type_ids=None, sampling_params=parameters,
            return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False,
        )  # fmt: skip
        self.tokens: Future[list[int]] = Future()
        self._running: Any = None

    def note(self) -> None:
        """Find the request, and note its tokens once it has ended. Called in the scheduler's thread."""
        if self._running is None:
            waiting = [each for each in self._scheduler.waiting_queue if each.rid == self.request.rid]
            self._running = waiting[0] if waiting else None
        elif self._running.finished() and not self.tokens.done():
            self.tokens.set_result([int(token) for token in self._running.output_ids])
