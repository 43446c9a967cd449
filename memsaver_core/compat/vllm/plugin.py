"""The entry point that vLLM calls in each of its processes, and what it changes in the modules of a vLLM worker.

Until ``worker_config`` enables memsaver, patched functions do what they did before. A version may lack some of them.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core import communicators, process
from memsaver_core.compat.vllm import rpc, saved_buffers
from memsaver_core.compat.vllm.allocator import KV_CACHE, RUNTIME, WEIGHTS, WORKSPACE, MemsaverAllocator, vllm_allocator
from memsaver_core.compat.vllm.config import BACKEND, switch, worker_config
from memsaver_core.compat.vllm.custom_all_reduce import patch_custom_all_reduce
from memsaver_core.compat.vllm.import_hooks import Function, when_imported, wrap
from memsaver_core.compat.vllm.symmetric_memory import patch_symmetric_memory
from memsaver_core.errors import ConfigurationError


def allocate_under(owner: Any, name: str, tag_of: Callable[..., str | None]) -> None:
    """Have a function allocate under the tag that ``tag_of`` returns for its arguments; None: under no new one."""

    def allocate(original: Function, *args: Any, **kwargs: Any) -> Any:
        tag = tag_of(*args, **kwargs) if worker_config.enabled else None
        if tag is None:
            return original(*args, **kwargs)
        with vllm_allocator().use_memory_pool(tag):
            return original(*args, **kwargs)

    wrap(owner, name, allocate)


def call_after(owner: Any, name: str, action: Callable[[], None]) -> None:
    """Have ``action`` called whenever a function has returned."""

    def call(original: Function, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        action()
        return result

    wrap(owner, name, call)


def patch_allocator(module: ModuleType) -> None:
    """``vllm.device_allocator.cumem``: the singleton is ours."""
    original = module.CuMemAllocator
    get_original = original.get_instance

    def get_instance() -> Any:
        if not worker_config.enabled:
            return get_original()
        if not isinstance(original.instance, MemsaverAllocator):
            if original.instance is not None:
                raise ConfigurationError(
                    "vLLM's own allocator is in use in this process already; start the engine in a new one"
                )
            original.instance = MemsaverAllocator()
        return original.instance

    original.get_instance = staticmethod(get_instance)


def patch_backends(module: ModuleType) -> None:
    """``vllm.device_allocator.sleep_mode_backend``: one more backend, chosen by name or by ``MEMSAVER_VLLM``."""
    factory = module.SleepModeBackendFactory
    if BACKEND in factory._registry:
        return
    factory.register_backend(BACKEND, "memsaver_core.compat.vllm.backend", "MemsaverBackend")
    create_original = factory.create_backend

    def create_backend(model_config: Any) -> Any:
        if worker_config.enabled:
            return factory.get_backend_class(BACKEND)()
        return create_original(model_config)

    factory.create_backend = staticmethod(create_backend)


def patch_platforms(module: ModuleType) -> None:
    """``vllm.platforms.interface``: graphs are captured into our pool."""

    def get_global_graph_pool(original: Function, platform: Any) -> Any:
        return vllm_allocator().graph_pool() if worker_config.enabled else original(platform)

    wrap(module.Platform, "get_global_graph_pool", get_global_graph_pool)


def patch_runner(module: ModuleType) -> None:
    """``vllm.v1.worker.gpu_model_runner`` and its successor: buffers and KV cache, each under a tag of its own."""
    allocate_under(module.GPUModelRunner, "__init__", lambda *_, **__: RUNTIME)
    allocate_under(module.GPUModelRunner, "_allocate_kv_cache_tensors", _cache_tag)
    allocate_under(module.GPUModelRunner, "allocate_uniform_kv_caches", _cache_tag)


def patch_attention(module: ModuleType) -> None:
    """``vllm.v1.worker.gpu.attn_utils``: the KV cache of the runner's successor."""
    allocate_under(module, "_allocate_kv_cache", _cache_tag)


def _cache_tag(*_: Any, **__: Any) -> str | None:
    # None while vLLM measures how much cache it needs.
    return KV_CACHE if worker_config.tags_cache_alone else None


def patch_workspaces(module: ModuleType) -> None:
    """``vllm.v1.worker.workspace``: scratch memory, unless vLLM tags it itself."""

    def tag_of(manager: Any, required_bytes: int) -> str | None:
        # Called in every layer.
        held = manager._current_workspaces
        if manager._locked or all(
            each is not None and each.numel() * each.element_size() >= required_bytes for each in held
        ):
            return None
        process.backend().forget_pools(WORKSPACE)  # so that the smaller buffer returns to the driver, not to the pool
        return WORKSPACE

    if not hasattr(module.WorkspaceManager, "_alloc_context"):
        allocate_under(module.WorkspaceManager, "_ensure_workspace_size", tag_of)


def patch_sampling(module: ModuleType) -> None:
    """``vllm.v1.sample.ops.topk_topp_triton``: its scratch, one buffer per device that is never freed."""
    cache = getattr(module, "_TRITON_BUFFER_CACHE", None)
    if cache is None:
        return

    def tag_of(logits: Any, *_: Any, **__: Any) -> str | None:
        held = cache.get((logits.device, logits.dtype, logits.shape[-1]))
        needed = min(logits.shape[0], _multiprocessors(logits.device.index))
        return None if held is not None and held.shape[0] >= needed else WORKSPACE

    allocate_under(module, "apply_top_k_top_p_triton", tag_of)


def patch_flashinfer(module: ModuleType) -> None:
    """``vllm.v1.attention.backends.flashinfer``: its workspaces, allocated at their first use and then kept."""

    def tag_unless(held: Any) -> str | None:
        return WORKSPACE if held is None else None

    allocate_under(
        module,
        "_get_trtllm_workspace_buffer",
        lambda *_, **__: tag_unless(vars(module).get("trtllm_workspace_buffer", "?")),
    )
    allocate_under(
        getattr(module, "FlashInferMetadataBuilder", None),
        "_get_workspace_buffer",
        lambda self, *_, **__: tag_unless(vars(self).get("_workspace_buffer", "?")),
    )


def patch_captures(module: ModuleType) -> None:
    """``vllm.distributed.parallel_state``: the capture stream gets its cuBLAS workspace before the first capture."""

    @contextmanager
    def graph_capture(original: Function, *args: Any, **kwargs: Any) -> Iterator[Any]:
        with original(*args, **kwargs) as context:
            _make_cublas_workspaces()
            yield context

    wrap(module, "graph_capture", graph_capture)


def patch_worker(module: ModuleType) -> None:
    """``vllm.v1.worker.gpu_worker``: the worker itself."""
    worker = module.Worker
    wrap(worker, "__init__", _deciding)
    call_after(worker, "init_device", _complete_device)
    wrap(worker, "initialize_from_config", _with_cache_alone)
    call_after(worker, "compile_or_warm_up_model", _prepare_backup)
    wrap(worker, "sleep", _asleep)
    wrap(worker, "wake_up", _without_early_buffers)
    worker.memsaver = rpc.answer


def _deciding(init: Function, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    worker_config.decide(vllm_config)
    if worker_config.enabled:
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # NCCL is not in use yet
    init(self, vllm_config, *args, **kwargs)


def _complete_device() -> None:
    _make_cublas_workspaces()
    if worker_config.enabled:
        communicators.warn_of_registered_graphs()


def _make_cublas_workspaces() -> None:
    """Have torch allocate cuBLAS's workspaces of the current stream under the tag for scratch.

    torch allocates them at a stream's first matrix product, and captured graphs then hold their addresses.
    """
    if not worker_config.enabled or not process.backend().has_memory_pools:
        return
    with vllm_allocator().use_memory_pool(WORKSPACE), torch.inference_mode():
        square = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
        torch.mm(square, square)
        torch.nn.functional.linear(square, square, square[0])


@functools.lru_cache
def _multiprocessors(device: int | None) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _prepare_backup() -> None:
    if worker_config.enabled and ms.core_settings().prepare_backup:
        ms.prepare_backup()  # all that a sleep keeps is allocated now; pin its host memory before the first sleep


def _with_cache_alone(initialize_from_config: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Put only the cache itself under its tag if vLLM uses the cache's pool for all that it makes beside it.

    Attention metadata and block tables are written once, and would be lost with the cache.
    """

    context = getattr(self, "_maybe_get_memory_pool_context", None)
    runner = getattr(self, "model_runner", None)
    if not worker_config.enabled or context is None or not _tags_cache_alone(runner):
        return initialize_from_config(self, *args, **kwargs)
    self._maybe_get_memory_pool_context = lambda tag: context(RUNTIME if tag == KV_CACHE else tag)
    worker_config.tags_cache_alone = True
    try:
        return initialize_from_config(self, *args, **kwargs)
    finally:
        worker_config.tags_cache_alone = False
        del self._maybe_get_memory_pool_context


def _tags_cache_alone(runner: Any) -> bool:
    """Whether the functions in which this runner allocates the cache are patched."""
    initialize = getattr(runner, "initialize_kv_cache", None)
    if runner is None or (initialize and "kv_cache_allocation_context" in inspect.signature(initialize).parameters):
        return False  # vLLM separates the two itself
    own = getattr(type(runner), "_allocate_kv_cache_tensors", None)
    successor = getattr(sys.modules.get("vllm.v1.worker.gpu.attn_utils"), "_allocate_kv_cache", None)
    return hasattr(successor if own is None else own, "_memsaver_wraps")


def _asleep(sleep: Function, self: Any, level: int = 1) -> None:
    """Keep vLLM from saving buffers of weights that are released already; it has saved them."""
    if worker_config.enabled and level == 2 and _weights_are_released():
        level = 1
    with rpc.sleeping():
        sleep(self, level)


def _without_early_buffers(wake_up: Function, self: Any, tags: list[str] | None = None) -> Any:
    """Keep vLLM from writing the buffers that it saved at level 2 back into weights that are still released."""
    if not worker_config.enabled or tags is None or WEIGHTS in tags or not _weights_are_released():
        return wake_up(self, tags)
    with saved_buffers.set_aside(self):
        return wake_up(self, tags)


def _weights_are_released() -> bool:
    return any(tag.tag == WEIGHTS and tag.released_bytes for tag in ms.status().tags)


#: The patch of each module, applied when vLLM imports it. A module that a version of vLLM lacks is never imported.
PATCHES = (
    ("vllm.device_allocator.cumem", patch_allocator),
    ("vllm.device_allocator.sleep_mode_backend", patch_backends),
    ("vllm.platforms.interface", patch_platforms),
    ("vllm.v1.worker.gpu_model_runner", patch_runner),
    ("vllm.v1.worker.gpu.model_runner", patch_runner),
    ("vllm.v1.worker.gpu.attn_utils", patch_attention),
    ("vllm.v1.worker.workspace", patch_workspaces),
    ("vllm.v1.sample.ops.topk_topp_triton", patch_sampling),
    ("vllm.v1.attention.backends.flashinfer", patch_flashinfer),
    ("vllm.distributed.parallel_state", patch_captures),
    ("vllm.distributed.device_communicators.custom_all_reduce", patch_custom_all_reduce),
    ("vllm.distributed.device_communicators.symm_mem", patch_symmetric_memory),
    ("vllm.v1.worker.gpu_worker", patch_worker),
)


@functools.cache
def register() -> None:
    """Make memsaver available to vLLM's sleep mode. Whether an engine uses it is decided when its workers are made.

    Imports nothing of vLLM, and does nothing if ``MEMSAVER_VLLM=0``. A second call does nothing.
    """
    if switch() is False:
        return
    for module, patch in PATCHES:
        when_imported(module, patch)
