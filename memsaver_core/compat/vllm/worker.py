"""What memsaver changes in a worker of vLLM, and what it answers to ``collective_rpc("memsaver", ...)``."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from types import ModuleType
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core import process
from memsaver_core.compat.vllm.allocator import MemsaverAllocator
from memsaver_core.compat.vllm.board import Board
from memsaver_core.compat.vllm.tags import KV_CACHE, RUNTIME, WEIGHTS, WORKSPACE
from memsaver_core.errors import ConfigurationError, MemsaverError

logger = logging.getLogger(__name__)

SWITCH = "MEMSAVER_VLLM"
BACKEND = "memsaver"

_engaged = False
_graphs_tagged = False
_keeping_apart = False


def asked_for() -> bool | None:
    """What ``MEMSAVER_VLLM`` says; None where it is not set.

    Raises:
        ConfigurationError: it is neither 1 nor 0.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{SWITCH}={value!r} cannot be used; set it to 1 or 0")
    return None if value == "" else value == "1"


def is_wanted(model_config: Any) -> bool:
    """Whether an engine of this configuration shall sleep by memsaver."""
    if not getattr(model_config, "enable_sleep_mode", False):
        return False
    backend = getattr(model_config, "sleep_mode_backend", "cumem")
    return backend == BACKEND or (backend == "cumem" and asked_for() is True)


def engage(vllm_config: Any) -> None:
    """Decide for the worker that is being made in this process."""
    global _engaged, _graphs_tagged
    model_config = getattr(vllm_config, "model_config", None)
    _engaged = is_wanted(model_config) and ms.enabled()
    if not _engaged:
        if asked_for() and not getattr(model_config, "enable_sleep_mode", False):
            logger.warning("%s=1 without sleep mode does nothing; start the engine with --enable-sleep-mode", SWITCH)
        return
    parallel = getattr(vllm_config, "parallel_config", None)
    shared = getattr(parallel, "tensor_parallel_size", 1) > 1
    _graphs_tagged = not (shared and not getattr(parallel, "disable_custom_all_reduce", False))
    if not _graphs_tagged:
        logger.warning(
            "CUDA graphs stay resident: vLLM's custom all-reduce shares their memory between processes, which memory "
            "that can be released does not allow. Start the engine with --disable-custom-all-reduce to release it"
        )


# -- what is changed, module by module ---------------------------------------------------------------------------------


def change_allocator(module: ModuleType) -> None:
    """``vllm.device_allocator.cumem``: the one instance is ours."""
    original = module.CuMemAllocator
    get_original = original.get_instance

    def get_instance() -> Any:
        if not _engaged:
            return get_original()
        if not isinstance(original.instance, MemsaverAllocator):
            if original.instance is not None:
                raise ConfigurationError(
                    "vLLM's own allocator is in use in this process already; start the engine in a new one"
                )
            original.instance = MemsaverAllocator()
        return original.instance

    original.get_instance = staticmethod(get_instance)


def change_backends(module: ModuleType) -> None:
    """``vllm.device_allocator.sleep_mode_backend``: one more backend, chosen by name or by the environment."""
    factory = module.SleepModeBackendFactory
    if BACKEND in factory._registry:
        return
    factory.register_backend(BACKEND, "memsaver_core.compat.vllm.backend", "MemsaverBackend")
    create_original = factory.create_backend

    def create_backend(model_config: Any) -> Any:
        if _engaged:
            return factory.get_backend_class(BACKEND)()
        return create_original(model_config)

    factory.create_backend = staticmethod(create_backend)


def change_platforms(module: ModuleType) -> None:
    """``vllm.platforms.interface``: graphs are captured into a pool of ours."""
    wrap(module.Platform, "get_global_graph_pool", _with_our_graph_pool)


def _with_our_graph_pool(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_global_graph_pool(platform: Any) -> Any:
        return allocator().graph_pool() if _engaged and _graphs_tagged else original(platform)

    return get_global_graph_pool


def change_runner(module: ModuleType) -> None:
    """``vllm.v1.worker.gpu_model_runner`` and its successor: buffers and KV cache, each under a tag of its own."""
    wrap(module.GPUModelRunner, "__init__", _inside(RUNTIME))
    wrap(module.GPUModelRunner, "_allocate_kv_cache_tensors", _as_cache)
    wrap(module.GPUModelRunner, "allocate_uniform_kv_caches", _as_cache)


def change_attention(module: ModuleType) -> None:
    """``vllm.v1.worker.gpu.attn_utils``: as the runner."""
    wrap(module, "_allocate_kv_cache", _as_cache)


def change_workspaces(module: ModuleType) -> None:
    """``vllm.v1.worker.workspace``: scratch under its tag, where vLLM does not do that itself."""
    if not hasattr(module.WorkspaceManager, "_alloc_context"):
        wrap(module.WorkspaceManager, "_ensure_workspace_size", _growing)


def change_sampling(module: ModuleType) -> None:
    """``vllm.v1.sample.ops.topk_topp_triton``: its scratch, one buffer per device for as long as the process lives."""
    cache = getattr(module, "_TRITON_BUFFER_CACHE", None)
    if cache is None:
        return

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(logits: Any, *args: Any, **kwargs: Any) -> Any:
            if not _engaged:
                return original(logits, *args, **kwargs)
            held = cache.get((logits.device, logits.dtype, logits.shape[-1]))
            needed = min(logits.shape[0], _multiprocessors(logits.device.index))
            if held is not None and held.shape[0] >= needed:
                return original(logits, *args, **kwargs)
            with allocator().use_memory_pool(WORKSPACE):
                return original(logits, *args, **kwargs)

        return apply

    wrap(module, "apply_top_k_top_p_triton", make)


def change_flashinfer(module: ModuleType) -> None:
    """``vllm.v1.attention.backends.flashinfer``: its workspaces, which it allocates when it first needs them."""
    builder = getattr(module, "FlashInferMetadataBuilder", None)
    wrap(module, "_get_trtllm_workspace_buffer", _unless_held(lambda: vars(module).get("trtllm_workspace_buffer", "?")))
    wrap(builder, "_get_workspace_buffer", _unless_held(lambda self: vars(self).get("_workspace_buffer", "?")))


def change_captures(module: ModuleType) -> None:
    """``vllm.distributed.parallel_state``: the stream of captures gets its cuBLAS workspace before the first one."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def graph_capture(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with original(*args, **kwargs) as context:
                _make_cublas_workspaces()
                yield context

        return graph_capture

    wrap(module, "graph_capture", make)


def change_worker(module: ModuleType) -> None:
    """``vllm.v1.worker.gpu_worker``: the worker itself."""
    worker = module.Worker
    wrap(worker, "__init__", _engaging)
    wrap(worker, "init_device", _with_cublas)
    wrap(worker, "initialize_from_config", _with_state_apart)
    wrap(worker, "compile_or_warm_up_model", _preparing)
    wrap(worker, "wake_up", _without_early_buffers)
    worker.memsaver = answer


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put ``make(original)`` in the place of a function, once; where there is no such function, do nothing."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_memsaver_wraps"):
        return
    wrapper = functools.wraps(original)(make(original))
    wrapper._memsaver_wraps = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def _inside(tag: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            if not _engaged:
                return original(*args, **kwargs)
            with allocator().use_memory_pool(tag):
                return original(*args, **kwargs)

        return inside

    return make


def _unless_held(held: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Under the tag for scratch where ``held`` says None: the function is about to allocate what it then keeps."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def get(*args: Any) -> Any:
            if not _engaged or held(*args) is not None:
                return original(*args)
            with allocator().use_memory_pool(WORKSPACE):
                return original(*args)

        return get

    return make


def _as_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    """Under the cache's tag where the cache is made for good, and not where vLLM tries out how much it needs."""

    def allocate(*args: Any, **kwargs: Any) -> Any:
        if not _keeping_apart:
            return original(*args, **kwargs)
        with allocator().use_memory_pool(KV_CACHE):
            return original(*args, **kwargs)

    return allocate


def _growing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Under the tag for scratch, and only where there is something to allocate: this runs in every layer."""

    def ensure_workspace_size(self: Any, required_bytes: int) -> Any:
        large_enough = all(
            each is not None and each.numel() * each.element_size() >= required_bytes
            for each in self._current_workspaces
        )
        if not _engaged or large_enough or self._locked:
            return original(self, required_bytes)
        process.backend().forget_pools(
            WORKSPACE
        )  # the smaller one goes back to the driver instead of staying in the pool
        with allocator().use_memory_pool(WORKSPACE):
            return original(self, required_bytes)

    return ensure_workspace_size


def _engaging(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        engage(vllm_config)
        original(self, vllm_config, *args, **kwargs)

    return init


def _with_cublas(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_device(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _make_cublas_workspaces()
        return result

    return init_device


def _make_cublas_workspaces() -> None:
    """Have torch make the workspaces that cuBLAS keeps for the current stream, under the tag for scratch.

    torch allocates them at a stream's first product of matrices, and captured graphs then hold their addresses.
    """
    if not _engaged or not process.backend().has_memory_pools:
        return
    with allocator().use_memory_pool(WORKSPACE), torch.inference_mode():
        square = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
        torch.mm(square, square)
        torch.nn.functional.linear(square, square, square[0])


@functools.lru_cache
def _multiprocessors(device: int | None) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _preparing(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_or_warm_up_model(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if _engaged and ms.core_settings().prepare_backup:
            ms.prepare_backup()  # all that a sleep keeps is there: the first one shall be as fast as the tenth
        return result

    return compile_or_warm_up_model


def _with_state_apart(original: Callable[..., Any]) -> Callable[..., Any]:
    """Where vLLM puts all that it makes for the KV cache into the cache's pool, let only the cache itself go there.

    Attention metadata and block tables are written once, and the cache's pool comes back empty.
    """

    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = getattr(self, "_maybe_get_memory_pool_context", None)
        global _keeping_apart
        if not _engaged or context is None or not _allocates_apart(getattr(self, "model_runner", None)):
            return original(self, *args, **kwargs)
        self._maybe_get_memory_pool_context = lambda tag: context(RUNTIME if tag == KV_CACHE else tag)
        _keeping_apart = True
        try:
            return original(self, *args, **kwargs)
        finally:
            _keeping_apart = False
            del self._maybe_get_memory_pool_context

    return initialize_from_config


def _allocates_apart(runner: Any) -> bool:
    """Whether the functions in which this runner allocates the cache itself are those that we have put a tag on."""
    if runner is None or "kv_cache_allocation_context" in _parameters(getattr(runner, "initialize_kv_cache", None)):
        return False  # vLLM keeps the two apart by itself
    own = getattr(type(runner), "_allocate_kv_cache_tensors", None)
    successor = getattr(sys.modules.get("vllm.v1.worker.gpu.attn_utils"), "_allocate_kv_cache", None)
    return hasattr(successor if own is None else own, "_memsaver_wraps")


def _parameters(function: Any) -> Sequence[str]:
    return () if function is None else list(inspect.signature(function).parameters)


def _without_early_buffers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep vLLM from writing the buffers that it saved at level 2 back into weights that are still asleep."""

    def wake_up(self: Any, tags: list[str] | None = None) -> Any:
        saved = getattr(self, "_sleep_saved_buffers", None)
        if not _engaged or not saved or tags is None or WEIGHTS in tags or not _is_released(WEIGHTS):
            return original(self, tags)
        self._sleep_saved_buffers = {}
        try:
            return original(self, tags)
        finally:
            self._sleep_saved_buffers = saved

    return wake_up


def _is_released(tag: str) -> bool:
    return any(each.tag == tag and each.released_bytes for each in ms.status().tags)


def allocator() -> MemsaverAllocator:
    from vllm.device_allocator.cumem import CuMemAllocator

    ours: MemsaverAllocator = CuMemAllocator.get_instance()
    return ours


# -- what the service asks ---------------------------------------------------------------------------------------------

#: What the last release or resume that the service asked for came to, until it asks.
_outcome: dict[str, Any] | None = None


def answer(worker: Any, command: str, *arguments: Any) -> dict[str, Any]:
    """Do what the service asks of this rank. Errors are part of the answer: a rank that raised would be lost to vLLM.

    Commands:
        ``hello``: status, devices, what stands in the way of hibernation, and where the board is.
        ``expect_release(plan)``: the worker's next sleep releases what ``plan`` says: ``tags``, ``restore``, ``trim``.
        ``sleep(plan, level)``: the same at once, for an engine that takes its workers to be asleep already.
        ``release(plan)``: release without the worker, which could not sleep while the process is hibernated.
        ``outcome()``: the report of that release.
        ``hibernate(tags)``: the context goes, too. Not in the sleep, in which the worker calls CUDA.
        ``resume(tags)``: wake up ``tags`` alone, everything where it is None.

    Returns:
        ``status`` with what the rank holds then, and ``report`` or ``error`` where there is one.
    """
    global _outcome
    given: dict[str, Any] = {}
    try:
        if command == "expect_release":
            _outcome = None
            allocator().instead = functools.partial(_release, *arguments)
        elif command == "sleep":
            given = _sleep(worker, *arguments)
        elif command == "release":
            _release(*arguments)
            given = _take_outcome()
        elif command == "outcome":
            given = _take_outcome()
        elif command == "hibernate":
            given = _hibernate(*arguments)
        elif command == "resume":
            given = _resume(worker, *arguments)
        elif command == "hello":
            given = _introduction()
        else:
            raise ConfigurationError(f"unknown command {command!r}; the service and its workers are of one version")
    except Exception as error:
        given = {"error": described(error)}
    return {**given, "status": asdict(ms.status()) if _engaged else None}


def _introduction() -> dict[str, Any]:
    if not _engaged:
        return {"devices": [], "blockers": []}
    return {
        "devices": [asdict(device) for device in ms.read_devices()],
        "blockers": ms.hibernation_obstacles(),
        "pid": os.getpid(),
        "board": _board().place,
    }


@functools.lru_cache
def _board() -> Board:
    return Board()


def _release(plan: Mapping[str, Any]) -> None:
    """Runs in the worker's sleep, in the place of what vLLM tells the allocator."""
    global _outcome
    try:
        report = _at_work(lambda log: ms.release(plan["tags"], restore=plan["restore"], trim=plan["trim"], log=log))
    except Exception as error:
        _outcome = {"error": described(error)}
    else:
        _outcome = {"report": report}


def _hibernate(tags: list[str]) -> dict[str, Any]:
    return {"hibernated": _at_work(lambda log: ms.release(tags, hibernate=True, log=log))}


def _at_work(operate: Callable[[ms.PhaseLog], ms.OperationReport]) -> dict[str, Any]:
    """The report of an operation, during which this rank's board shows how far it is."""
    log = ms.PhaseLog()
    try:
        with _board().showing(log):
            return asdict(operate(log))
    except Exception as error:
        error.__dict__["phase"] = log.failed  # goes with it to the service, as its other attributes do
        raise


def _take_outcome() -> dict[str, Any]:
    global _outcome
    allocator().instead = None
    outcome, _outcome = _outcome, None
    return outcome or {}


def _sleep(worker: Any, plan: Mapping[str, Any], level: int) -> dict[str, Any]:
    allocator().instead = functools.partial(_release, plan)
    try:
        worker.sleep(level)
    except Exception:
        if _outcome is None:
            raise
        logger.exception("the memory was released; vLLM's worker failed after that")
    return _take_outcome()


def _resume(worker: Any, tags: list[str] | None) -> dict[str, Any]:
    outcome: dict[str, Any] = {}

    def resume() -> None:
        # A failure leaves all asleep; then vLLM must not go on to restore what it saved.
        outcome["report"] = _at_work(lambda log: ms.resume(tags, log=log))

    with _waking(resume):
        # vLLM, too, shall know when this is the last of it.
        worker.wake_up(tags if tags is not None and _stays_released(tags) else None)
    return outcome


def _stays_released(tags: Sequence[str]) -> bool:
    return any(each.released_bytes and each.tag not in tags for each in ms.status().tags)


@contextmanager
def _waking(resume: Callable[[], None]) -> Iterator[None]:
    ours = allocator()
    ours.instead = resume
    try:
        yield
    finally:
        ours.instead = None


def described(error: BaseException) -> dict[str, Any]:
    """An error as plain data: its type's name, its message, and the attributes that its type documents."""
    plain = {
        name: value
        for name, value in vars(error).items()
        if isinstance(value, (str, int, float, list)) and not name.startswith("_")
    }
    kind = type(error).__name__ if isinstance(error, MemsaverError) else "MemsaverError"
    message = str(error) if isinstance(error, MemsaverError) else f"{type(error).__name__}: {error}"
    return {"type": kind, "message": message, "attributes": plain}
