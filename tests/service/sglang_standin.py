"""Stands in for SGLang's scheduler, with the names that memsaver uses, and with an engine small enough to follow.

Its model is a table of weights and a buffer, under ``weights``; the cache holds one number per token, under
``kv_cache``; the next token is computed from the sum of the cached numbers. So lost weights, a lost buffer, or a cached
prefix without pages give other tokens.

It has one rank or several. Then rank 0 receives requests, and broadcasts them as SGLang does: to the tensor-parallel
ranks of its stage, and from stage to stage. Each rank has other weights, and a token is computed from the sums of all,
so it depends on the memory of every rank; ranks that do not compute the same batch hang.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from queue import Empty, Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

VOCABULARY = 97
PAGES = 4096

# sglang.srt.managers.io_struct


@dataclass
class TokenizedGenerateReqInput:
    rid: str
    input_ids: list[int] = field(default_factory=list)
    max_new_tokens: int = 8
    http_worker_ipc: str | None = None
    input_text: str | None = None
    input_embeds: Any = None
    mm_inputs: Any = None
    token_type_ids: list[int] | None = None
    sampling_params: Any = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    stream: bool = False


@dataclass
class TokenizedEmbeddingReqInput:
    rid: str


@dataclass
class BatchTokenizedGenerateReqInput:
    batch: list[TokenizedGenerateReqInput]

    def __iter__(self) -> Iterator[TokenizedGenerateReqInput]:
        return iter(self.batch)


@dataclass
class BatchTokenizedEmbeddingReqInput:
    batch: list[TokenizedEmbeddingReqInput]

    def __iter__(self) -> Iterator[TokenizedEmbeddingReqInput]:
        return iter(self.batch)


@dataclass
class AbortReq:
    rid: str = ""
    abort_all: bool = False
    finished_reason: dict[str, Any] | None = None


@dataclass
class PauseGenerationReqInput:
    mode: str = "abort"


@dataclass
class ContinueGenerationReqInput:
    torch_empty_cache: bool = False


@dataclass
class UpdateWeightsFromTensorReqInput:
    table: torch.Tensor
    rid: str = ""
    weight_version: str | None = None


@dataclass
class UpdateWeightsFromTensorReqOutput:
    success: bool
    message: str = ""


@dataclass
class BeginWeightUpdateReqInput:
    rid: str = ""


@dataclass
class EndWeightUpdateReqInput(BeginWeightUpdateReqInput):
    pass


@dataclass
class BeginWeightUpdateReqOutput:
    success: bool
    message: str = ""


@dataclass
class EndWeightUpdateReqOutput(BeginWeightUpdateReqOutput):
    pass


@dataclass
class UpdateWeightFromDiskReqInput:
    pass


@dataclass
class UpdateWeightFromDiskReqOutput:
    pass


@dataclass
class UpdateWeightsFromDistributedReqInput:
    pass


@dataclass
class UpdateWeightsFromDistributedReqOutput:
    pass


@dataclass
class CheckWeightsReqInput:
    pass


@dataclass
class CheckWeightsReqOutput:
    pass


@dataclass
class ReleaseMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass
class ReleaseMemoryOccupationReqOutput:
    rid: str | None = None


@dataclass
class ResumeMemoryOccupationReqInput(ReleaseMemoryOccupationReqInput):
    pass


@dataclass
class ResumeMemoryOccupationReqOutput(ReleaseMemoryOccupationReqOutput):
    pass


@dataclass
class FlushCacheReqInput:
    rid: str = ""


@dataclass
class FlushCacheReqOutput:
    success: bool
    message: str = ""


@dataclass
class GetInternalStateReq:
    rid: str = ""


@dataclass
class GetInternalStateReqOutput:
    internal_state: dict[str, Any]


# Of this stand-in alone.


@dataclass
class Stall:
    """Set ``Scheduler.stalled`` on every rank."""

    stalled: bool


@dataclass
class Exit:
    """End the event loop of every rank."""


@dataclass
class Run:
    """Call ``call`` with the scheduler on the rank ``rank``."""

    rank: int
    call: Callable[[Any], None]


MESSAGES = (
    TokenizedGenerateReqInput, TokenizedEmbeddingReqInput, BatchTokenizedGenerateReqInput,
    BatchTokenizedEmbeddingReqInput, AbortReq, PauseGenerationReqInput, ContinueGenerationReqInput,
    UpdateWeightsFromTensorReqInput, UpdateWeightsFromTensorReqOutput, UpdateWeightFromDiskReqInput,
    UpdateWeightFromDiskReqOutput, UpdateWeightsFromDistributedReqInput, UpdateWeightsFromDistributedReqOutput,
    CheckWeightsReqInput, CheckWeightsReqOutput, ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput, ResumeMemoryOccupationReqInput, ResumeMemoryOccupationReqOutput,
    BeginWeightUpdateReqInput, BeginWeightUpdateReqOutput, EndWeightUpdateReqInput, EndWeightUpdateReqOutput,
    FlushCacheReqInput, FlushCacheReqOutput, GetInternalStateReq, GetInternalStateReqOutput,
)  # fmt: skip

# sglang.srt.sampling.sampling_params


class SamplingParams:
    """Of the verification prompt; this engine is greedy."""

    def __init__(self, **_values: Any) -> None:
        pass

    def normalize(self, tokenizer: Any) -> None:
        pass


# sglang.srt.utils.torch_memory_saver_adapter


class Adapter:
    """Its calls are the ones in tests/unit/test_compat_adapters.py."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager[None]:
        if not self.enabled:
            return nullcontext()
        saver = sys.modules[type(self).__module__].torch_memory_saver.torch_memory_saver
        region: AbstractContextManager[None] = saver.region(tag=tag, enable_cpu_backup=enable_cpu_backup)
        return region


# sglang.srt.managers.scheduler


class DisaggregationMode(Enum):
    NULL = "null"
    PREFILL = "prefill"


class Model(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.table = torch.nn.Parameter((torch.arange(VOCABULARY, dtype=torch.float64) + 1) * (rank + 1))
        self.register_buffer("scale", torch.tensor([3.0], dtype=torch.float64))


@dataclass(eq=False)
class Req:
    rid: str
    tokens: list[int]
    wanted: int
    pages: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    to_finish: bool = False

    def finished(self) -> bool:
        return len(self.output_ids) >= self.wanted


class ScheduleBatch:
    def __init__(self) -> None:
        self.reqs: list[Req] = []

    def is_empty(self) -> bool:
        return not self.reqs


class Pool:
    """The pages and their users."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.free = list(range(PAGES))

    def reset_aux_cache_allocator(self) -> None:
        pass


class Tree:
    """The pages of computed prefixes."""

    def __init__(self) -> None:
        self.prefixes: dict[tuple[int, ...], list[int]] = {}
        self.cache_controller: Any = None  # of the hierarchical cache

    def reset(self) -> None:
        self.prefixes.clear()


class Tokenizer:
    """The answers that the tokenizer process is sent, by request."""

    def __init__(self) -> None:
        self.answers: Queue[tuple[str, Any]] = Queue()

    def send_output(self, output: Any, request: Any = None) -> None:
        self.answers.put((getattr(output, "rid", "") or getattr(request, "rid", ""), output))


@dataclass(frozen=True)
class Parallel:
    """``ParallelState`` of a scheduler."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    attn_dp_size: int = 1

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank


@dataclass(kw_only=True, frozen=True)
class SchedulerRequestReceiver:
    recv_from_tokenizer: Queue[Any] | None
    input_blocker: Any
    ps: Parallel
    tp_cpu_group: Any

    def recv_requests(self, local_reqs: list[Any] | None = None) -> list[Any]:
        received: Any = None
        if self.ps.tp_rank == 0:
            received = self._pull() if self.ps.pp_rank == 0 else receive(self.ps.rank - self.ps.tp_size)
        if self.input_blocker is not None:
            received = self.input_blocker.handle(received)
        if self.ps.tp_size > 1:
            shared = [received]
            try:
                dist.broadcast_object_list(shared, src=self.ps.pp_rank * self.ps.tp_size, group=self.tp_cpu_group)
            except RuntimeError:
                # A rank is dead. Some backends notice and some hang, which is harder for the service: hang always.
                threading.Event().wait()
            received = shared[0]
        requests: list[Any] = received
        return requests

    def _pull(self) -> list[Any]:
        assert self.recv_from_tokenizer is not None
        requests = []
        try:
            requests.append(self.recv_from_tokenizer.get(timeout=0.01))
            while True:
                requests.append(self.recv_from_tokenizer.get_nowait())
        except Empty:
            return requests


def send(data: Any, rank: int) -> list[Any]:
    """Begin to send ``data``; returns what must be kept until the next call."""
    content = torch.frombuffer(bytearray(pickle.dumps(data)), dtype=torch.uint8)
    size = torch.tensor([len(content)])
    return [size, content, dist.isend(size, rank), dist.isend(content, rank)]


def receive(rank: int) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, rank)
    content = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(content, rank)
    return pickle.loads(content.numpy().tobytes())


class Scheduler:
    def init_model_worker(self) -> None:
        pass

    def init_all_attention_backends(self) -> None:
        pass

    def __init__(self, *, enable_memory_saver: bool = True, enable_weights_cpu_backup: bool = True, **ranks: int):
        self.ps = Parallel(**ranks)
        self.disaggregation_mode = DisaggregationMode.NULL
        self.rust_server = None
        self.mm_receiver = None
        self.server_args = SimpleNamespace(model_path="/models/a table", nnodes=1)
        self.draft_worker = None
        self.memory_saver_adapter = Adapter(enable_memory_saver)
        with self.memory_saver_adapter.region("weights", enable_cpu_backup=enable_weights_cpu_backup):
            model = Model(self.ps.rank)
        with self.memory_saver_adapter.region("kv_cache"):
            self.cache = torch.zeros(PAGES, dtype=torch.float64)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=Tokenizer())
        self.received: Queue[Any] = Queue()
        self.several = dist.is_initialized()
        size = self.ps.tp_size * self.ps.pp_size
        everyone = list(range(size))
        self.world_group = SimpleNamespace(cpu_group=None, ranks=everyone, world_size=size, rank_in_group=self.ps.rank)
        stages = [everyone[start : start + self.ps.tp_size] for start in range(0, size, self.ps.tp_size)]
        groups = [dist.new_group(stage) for stage in stages] if self.several else [None]
        self.request_receiver = SchedulerRequestReceiver(
            recv_from_tokenizer=self.received if self.ps.rank == 0 else None,
            input_blocker=None,
            ps=self.ps,
            tp_cpu_group=groups[self.ps.pp_rank] if self.several else None,
        )
        self.req_to_token_pool = Pool()
        self.token_to_kv_pool_allocator = Pool()
        self.tree_cache = Tree()
        self.weight_updater = SimpleNamespace(flush_cache=self.flush_cache, offload_tags=set())
        self.gracefully_exit = False
        self.waiting_queue: list[Req] = []
        self.running_batch = ScheduleBatch()
        self.last_batch: ScheduleBatch | None = None
        self.chunked_req: Req | None = None
        self.return_health_check_ipcs: deque[str | None] = deque()
        self._engine_paused = False
        self._request_dispatcher: Callable[[Any], Any] = self._dispatch
        #: Set to keep requests from ending: each step then computes nothing.
        self.stalled = False
        self.update_error = ""

    def run_event_loop(self) -> None:
        sending: list[Any] = []
        while not self.gracefully_exit:
            requests = self.request_receiver.recv_requests()
            self.process_input_requests(requests)
            if self.ps.pp_rank + 1 < self.ps.pp_size and self.ps.tp_rank == 0:
                for each in sending[2:]:
                    each.wait()
                sending = send(requests, self.ps.rank + self.ps.tp_size)
            if self._engine_paused:
                continue
            self.running_batch.reqs += self.waiting_queue
            self.waiting_queue = []
            if self.running_batch.is_empty():
                self.last_batch = None
                continue
            if not self.stalled:
                for request in self.running_batch.reqs:
                    self._step(request)
            self.running_batch.reqs = [each for each in self.running_batch.reqs if not self._end(each)]
            self.last_batch = None

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        for request in recv_reqs:
            output = self._request_dispatcher(request)
            if output is not None:
                self.ipc_channels.send_to_tokenizer.send_output(output, request)

    def _dispatch(self, request: Any) -> Any:
        if isinstance(request, TokenizedGenerateReqInput):
            self.waiting_queue.append(Req(request.rid, list(request.input_ids), request.max_new_tokens))
        elif isinstance(request, BatchTokenizedGenerateReqInput):
            self.process_input_requests(list(request))
        elif isinstance(request, AbortReq):
            self.abort_request(request)
        elif isinstance(request, Stall):
            self.stalled = request.stalled
        elif isinstance(request, Run):
            if request.rank == self.ps.rank:
                request.call(self)
        elif isinstance(request, Exit):
            self.gracefully_exit = True
        elif isinstance(request, PauseGenerationReqInput):
            self.pause_generation(request)
        elif isinstance(request, ContinueGenerationReqInput):
            self.continue_generation(request)
        elif isinstance(request, UpdateWeightsFromTensorReqInput):
            if self.update_error:
                return UpdateWeightsFromTensorReqOutput(False, self.update_error)
            with torch.no_grad():
                self.tp_worker.model_runner.model.table.copy_(request.table * (self.ps.rank + 1))
            return UpdateWeightsFromTensorReqOutput(True)
        elif isinstance(request, EndWeightUpdateReqInput):
            return EndWeightUpdateReqOutput(True)
        elif isinstance(request, BeginWeightUpdateReqInput):
            return BeginWeightUpdateReqOutput(True)
        elif isinstance(request, FlushCacheReqInput):
            return FlushCacheReqOutput(self.flush_cache())
        else:
            raise TypeError(request)
        return None

    def _step(self, request: Req) -> None:
        model = self.tp_worker.model_runner.model
        tokens = request.tokens + request.output_ids
        with torch.no_grad():
            known = self.tree_cache.prefixes.get(tuple(request.tokens))
            if not request.pages and known is not None:
                request.pages = list(known)
            while len(request.pages) < len(tokens):
                page = self.token_to_kv_pool_allocator.free.pop()
                self.cache[page] = model.table[tokens[len(request.pages)]] * model.scale[0]
                request.pages.append(page)
            self.tree_cache.prefixes.setdefault(tuple(request.tokens), request.pages[: len(request.tokens)])
            total = self.cache[request.pages].sum()
            if self.several:
                dist.all_reduce(total)
            request.output_ids.append(int(total.item()) % VOCABULARY)

    def _end(self, request: Req) -> bool:
        if not (request.finished() or request.to_finish):
            return False
        self.ipc_channels.send_to_tokenizer.send_output(request)
        return True

    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        return self.running_batch.is_empty() and not self.waiting_queue and self.chunked_req is None

    def collect_inflight_reqs(self) -> set[Req]:
        return set(self.running_batch.reqs)

    def abort_request(self, recv_req: AbortReq) -> None:
        for request in [each for each in self.waiting_queue if recv_req.abort_all or each.rid == recv_req.rid]:
            self.waiting_queue.remove(request)
            self.ipc_channels.send_to_tokenizer.send_output(AbortReq(rid=request.rid))
        for request in self.running_batch.reqs:
            request.to_finish = request.to_finish or recv_req.abort_all or request.rid == recv_req.rid

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        assert recv_req.mode in ("in_place", "retract")
        self._engine_paused = True
        if recv_req.mode == "retract":
            for request in self.running_batch.reqs:
                request.pages = []
            self.waiting_queue += self.running_batch.reqs
            self.running_batch.reqs = []

    def continue_generation(self, recv_req: ContinueGenerationReqInput) -> None:
        self._engine_paused = False

    def flush_cache(self, empty_cache: bool = True) -> bool:
        if not self.is_fully_idle():
            return False
        self.tree_cache.reset()
        self.req_to_token_pool.clear()
        self.token_to_kv_pool_allocator.clear()
        return True

    def maybe_send_health_check_signal(self) -> None:
        if self.return_health_check_ipcs:
            self.ipc_channels.send_to_tokenizer.send_output(self.return_health_check_ipcs.popleft())


# sglang.srt.managers.tokenizer_manager


class TokenizerManager:
    def release_memory_occupation(self) -> None:
        pass

    def resume_memory_occupation(self) -> None:
        pass


# sglang.srt.plugins.hook_registry


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        path, _, attribute = target.rpartition(".")
        module, _, name = path.rpartition(".")
        owner = getattr(sys.modules[module], name)
        original = getattr(owner, attribute)
        setattr(owner, attribute, lambda *arguments: hook(original, *arguments))


def install(monkeypatch: pytest.MonkeyPatch, torch_memory_saver: ModuleType) -> type[Scheduler]:
    """Put the modules where memsaver looks for SGLang's while a test runs. Returns the scheduler's class."""
    scheduler: type[Scheduler] = type("Scheduler", (Scheduler,), {"__module__": "sglang.srt.managers.scheduler"})
    adapter = type("Adapter", (Adapter,), {"__module__": "sglang.srt.utils.torch_memory_saver_adapter"})
    monkeypatch.setattr(sys.modules[__name__], "Adapter", adapter)
    content: dict[str, dict[str, Any]] = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.configs": {},
        "sglang.srt.configs.load_config": {"LoadConfig": SimpleNamespace(_verify_load_format=lambda config: None)},
        "sglang.srt.entrypoints": {"engine": SimpleNamespace(_set_envs_and_config=lambda server_args: None)},
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": {each.__name__: each for each in MESSAGES},
        "sglang.srt.managers.scheduler": {"Scheduler": scheduler},
        "sglang.srt.managers.tokenizer_manager": {"TokenizerManager": TokenizerManager},
        "sglang.srt.mem_cache": {},
        "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": type("SWAKVPool", (), {})},
        "sglang.srt.model_executor": {},
        "sglang.srt.model_executor.cuda_graph_buffer_registry": {
            "CudaGraphBufferRegistry": SimpleNamespace(register_slot=lambda registry, slot: None)
        },
        "sglang.srt.model_executor.graph_shared_output": {
            "GraphSharedOutput": SimpleNamespace(get_logits_buffer=lambda shared, size: None)
        },
        "sglang.srt.model_executor.model_runner": {
            "ModelRunner": SimpleNamespace(init_lora_manager=lambda runner: None)
        },
        "sglang.srt.model_loader": {"loader": SimpleNamespace(device_loading_context=lambda module, device: None)},
        "sglang.srt.model_loader.loader": {
            "DefaultModelLoader": SimpleNamespace(
                load_model=lambda loader: None, load_weights_and_postprocess=lambda *_: None
            )
        },
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.runtime_context": {
            "RuntimeContext": SimpleNamespace(get_buffer=lambda context, name, factory: factory()),
            "get_parallel": lambda: None,
            "get_resources": lambda: SimpleNamespace(buffers={}),
        },
        "sglang.srt.sampling": {},
        "sglang.srt.sampling.sampling_params": {"SamplingParams": SamplingParams},
        "sglang.srt.utils": {},
        "sglang.srt.utils.torch_memory_saver_adapter": {"torch_memory_saver": torch_memory_saver},
    }
    for name, attributes in content.items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return scheduler
