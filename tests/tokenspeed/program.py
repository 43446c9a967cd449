"""tokenspeed's engine process, as `tokenspeed serve` starts it, without kernels.

Real are its gRPC and HTTP servers, the scheduler process with its event loop, request handler, output processor, C++
scheduler, and controllers of pauses and memory. In place of the model, its cache and their executor there are the ones
of this file: each token is computed from weights and a cache in tokenspeed's regions.
"""

from __future__ import annotations

import os
import runpy
import time
from types import SimpleNamespace
from typing import Any

import torch
from tokenspeed.runtime.distributed.process_group_manager import process_group_manager
from tokenspeed.runtime.engine import event_loop, pause
from tokenspeed.runtime.execution import device, factory
from tokenspeed.runtime.execution.forward_thread import ForwardThread
from tokenspeed.runtime.execution.types import ModelExecutionResult
from tokenspeed.runtime.execution.workspace import workspace_pool
from tokenspeed.runtime.layers.attention import registry
from tokenspeed.runtime.layers.attention.backends.paged.trtllm_mla import get_trtllm_workspace_buffer
from tokenspeed.runtime.layers.attention.kv_cache.recipes.cache_runtime import CacheRuntimeContract
from tokenspeed.runtime.layers.attention.kv_cache.recipes.spec import CacheGroupSpec
from tokenspeed.runtime.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import memsaver_core as ms
from memsaver_core import process

ROWS = 40
LENGTH = 4096
TOKENS = ROWS * LENGTH
PAGE = 64
VOCABULARY = 1000
#: The bytes of a backend's workspace in the block that backends share.
WORKSPACE = 1 << 20
#: How long a step takes, seconds: requests are then in flight for long enough to release beside them.
STEP_S = 0.004
#: How long a transfer of the cache runs after a step, during which prefixes cannot be forgotten, seconds.
TRANSFER_S = 0.05


def values() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (1 << 20,), generator=torch.Generator().manual_seed(7))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(values().to(ms.torch_device()), requires_grad=False)
        self.register_buffer("scale", torch.full((1,), 31, device=ms.torch_device()))


class Cache:
    supports_hierarchical_kv_cache = False
    prefix_cache_required_group_ids = None
    groups = (CacheGroupSpec("all", "full_history", PAGE, 1, replayable=False),)
    contract = CacheRuntimeContract(PAGE, TOKENS // PAGE, TOKENS, groups, {"all": TOKENS // PAGE + 1}, {"all": 1})
    arena = SimpleNamespace(runtime_contract=contract, cache_group_specs=groups, supports_disaggregation=False)

    def __init__(self) -> None:
        self.tokens = torch.zeros((ROWS, LENGTH), dtype=torch.int64, device=ms.torch_device())

    def bind_paged_cache_scheduler(self, scheduler: Any) -> None: ...

    def clear_kv_buffers(self) -> None:
        self.tokens.zero_()


class Executor:
    """Computes the next token of each request from all before it, by the cache's row of the request."""

    drafter = draft_field_writer = draft_model_runner = None
    eager_grammar_buffers = None
    execution_stream = None
    supports_prompt_logprobs = False
    config = SimpleNamespace(spec_algo=None, spec_num_steps=None, spec_num_tokens=None)
    stepped_at = 0.0
    view: torch.Tensor

    def __init__(self, model_runner: Runner, cache: Cache) -> None:
        self.workspace = get_trtllm_workspace_buffer(ms.torch_device())
        self.model_runner = model_runner
        self.token_to_kv_pool = cache
        self.forward_thread = ForwardThread("cpu")
        assert process.saver().owns(self.view.data_ptr())

    def autotune(self) -> None: ...

    def capture_graphs(self, **named: Any) -> None: ...

    def zero_cache_pages(self, pages: Any) -> None: ...

    def update_block_table(self, forward_op: Any) -> None: ...

    def reset_valid_cache_length(self, forward_op: Any) -> None: ...

    def accumulate_decode_stats(self, results: Any, batch: int) -> None: ...

    def execute_forward_op(self, forward_op: Any, *arguments: Any, **named: Any) -> ModelExecutionResult:
        time.sleep(STEP_S)
        assert not self.workspace[:64].any()  # a kernel leaves its semaphores as it expects them
        cache, model = self.token_to_kv_pool.tokens, self.model_runner.model
        ids, at, out = list(forward_op.input_ids), 0, []
        for number, row in enumerate(forward_op.request_pool_indices):
            if number < forward_op.num_extends():
                length, begin = forward_op.input_lengths[number], forward_op.extend_prefix_lens[number]
                cache[row, 0] = begin + length
                cache[row, 1 + begin : 1 + begin + length] = torch.tensor(ids[at : at + length])
                at += length
            length = int(cache[row, 0])
            before = cache[row, 1 : 1 + length]
            weight = model.weight[:: len(model.weight) // length][:length]
            token = int((before * weight).sum() * model.scale[0]) % VOCABULARY
            cache[row, 0], cache[row, 1 + length] = length + 1, token
            out.append(token)
        Executor.stepped_at = time.monotonic()
        ended = SimpleNamespace(synchronize=lambda: None)
        lengths = torch.ones(len(out), dtype=torch.int64)
        return ModelExecutionResult(output_tokens=torch.tensor(out), copy_event=ended, output_lengths=lengths)


class Runner:
    """Receives weights not from a trainer's process group but from the seed of ``Model``."""

    multimodal_encoder_dtype = expert_location_updater = None
    init_weights_update_group = destroy_weights_update_group = None

    def __init__(self) -> None:
        self.model = Model()

    def prepare_multimodal_runtime(self) -> None: ...

    def prepare_communication_runtime(self, tokens: int) -> None: ...

    def update_weights_from_distributed(self, request: Any) -> tuple[bool, str]:
        if request.names != ["weight"]:
            return False, f"there are no tensors {request.names}"
        self.model.weight.copy_(values())
        return True, "written"


def create_model_runner(server_args: Any, *arguments: Any) -> tuple[Any, None]:
    adapter = TorchMemorySaverAdapter.create(enable=server_args.enable_memory_saver)
    with adapter.region(tag="weights", enable_cpu_backup=True):
        return Runner(), None


def create_attn_components(server_args: Any, *arguments: Any, **named: Any) -> Any:
    adapter = TorchMemorySaverAdapter.create(enable=server_args.enable_memory_saver)
    get_trtllm_workspace_buffer(ms.torch_device())  # as a backend does for its process
    (Executor.view,) = workspace_pool(ms.torch_device()).allocate(((WORKSPACE,), torch.uint8))
    with adapter.region(tag="kv_cache", enable_cpu_backup=False):
        cache = Cache()
    nothing = dict.fromkeys(registry.AttentionBuild.__dataclass_fields__)
    return registry.AttentionBuild(**{**nothing, "token_to_kv_pool": cache})


def create_model_executor(server_args: Any, *, model_runner: Any, token_to_kv_pool: Any, **named: Any) -> Executor:
    return Executor(model_runner, token_to_kv_pool)


def init_distributed(loop: Any) -> float:
    mapping = loop.server_args.mapping
    address = f"tcp://127.0.0.1:{os.environ['RENDEZVOUS_PORT']}"
    torch.distributed.init_process_group("gloo", address, rank=mapping.rank, world_size=mapping.world_size)
    process_group_manager.init_process_group(mapping.attn.tp_group, "gloo")
    return 1.0


def reset_caches(loop: Any) -> bool:
    """As tokenspeed's own: not while a transfer runs."""
    return loop.attn_tp_rank > 0 or time.monotonic() > Executor.stepped_at + TRANSFER_S


class NoDeviceWork(TorchDispatchMode):
    """As tokenspeed's guard of the event loop's thread, which knows device work by tensors of CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and process.saver().owns(each.untyped_storage().data_ptr()):
                assert device._only_aliases_inputs(func), f"{func} on the device in the event loop's thread"
        return func(*args, **(kwargs or {}))


event_loop.EventLoop._init_distributed = init_distributed
event_loop.maybe_control_plane_guard = NoDeviceWork
factory.create_model_runner, factory.create_model_executor = create_model_runner, create_model_executor
registry.create_attn_components = create_attn_components
own_reset = pause.PauseHooks.reset_caches_for_release
pause.PauseHooks.reset_caches_for_release = lambda hooks: reset_caches(hooks._loop) and own_reset(hooks)
device._cudagraph_probe_refusal = lambda *arguments: "there are no graphs"
if __name__ == "__main__":
    runpy.run_module("smg_grpc_servicer.tokenspeed", run_name="__main__", alter_sys=False)
