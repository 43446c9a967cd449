"""The entry point that vLLM calls in each of its processes, and what it changes in a vLLM worker: see ``WRAPPERS``.
Until ``worker_memory`` enables memsaver, wrapped functions do what they did before. A version may lack some of them."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import ModuleType
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core import communicators, process
from memsaver_core.compat.patching import Function, when_imported, wrap, wrap_in
from memsaver_core.compat.vllm import allocator, asleep, cache_memory, core, loader
from memsaver_core.compat.vllm.allocator import MemsaverAllocator, worker_memory
from memsaver_core.compat.vllm.asleep import weights_are_released
from memsaver_core.contract.errors import ConfigurationError, UnsupportedError
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import MemoryRequest, Tagged
from memsaver_core.ranks import protocol
from memsaver_core.ranks.protocol import Failure, Plain
from memsaver_core.ranks.rank import Rank, Result
from memsaver_core.resizing import KV_CACHE
from memsaver_core.shared_buffers import PeerBuffers, PeerSockets

logger = logging.getLogger("memsaver")

SAMPLING = "vllm.v1.sample.ops.topk_topp_triton"
FLASHINFER = "vllm.v1.attention.backends.flashinfer"


@functools.cache
def register() -> None:
    """Make memsaver available to vLLM's sleep mode. Whether an engine uses it is decided when its workers are made.
    Imports nothing of vLLM, and does nothing if ``MEMSAVER_VLLM=0``. Idempotent."""
    if allocator.switch() is False:
        return
    for module, wrappers in WRAPPERS.items():
        wrap_in(module, {name: _if_enabled(wrapper) for name, wrapper in wrappers.items()})
    for module, wrappers in core.WRAPPERS.items():
        wrap_in(module, wrappers)
    when_imported("vllm.device_allocator.sleep_mode_backend", _add_backend)
    when_imported("vllm.v1.worker.gpu_worker", _decide_and_answer)
    when_imported("vllm.model_executor.model_loader", loader.register)
    when_imported("vllm.logger", _log_with_vllm)


def _log_with_vllm(_module: ModuleType) -> None:
    """Write memsaver's messages as vLLM's own, unless the user has set up other handlers: vLLM's server imports a
    package that sets the root logger to ERROR."""
    theirs, audit = logging.getLogger("vllm"), logging.getLogger("memsaver.audit")
    if logger.level == logging.NOTSET:
        logger.setLevel(theirs.level)
    if not logger.handlers and not logging.root.handlers:
        for handler in theirs.handlers:
            logger.addHandler(handler)
        if audit.level == logging.NOTSET:
            audit.setLevel(logging.WARNING)  # it has no handler unless the user asks for one


def _if_enabled(wrapper: Function) -> Function:
    def call(original: Function, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs) if worker_memory.enabled else original(*args, **kwargs)

    return call


def _under(tag: str | Callable[..., str | None]) -> Function:
    """Return a wrapper that has a function allocate under ``tag``, or what ``tag(*arguments)`` returns, if not None."""

    def allocate(original: Function, *args: Any, **kwargs: Any) -> Any:
        found = tag if isinstance(tag, str) else tag(*args, **kwargs)
        if found is None:
            return original(*args, **kwargs)
        with worker_memory.use_memory_pool(found):
            return original(*args, **kwargs)

    return allocate


# The worker.


def _decide_and_answer(module: ModuleType) -> None:
    def decide(init: Function, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        model_config = getattr(vllm_config, "model_config", None)
        worker_memory.enabled = allocator.is_wanted(model_config) and ms.enabled()
        if worker_memory.enabled:
            if getattr(model_config, "enable_nccl_comm_suspend", False):  # NCCL refuses to suspend one twice
                raise ConfigurationError(
                    "vLLM would suspend NCCL's communicators beside memsaver's service, which does so itself; start "
                    "the engine without --enable-nccl-comm-suspend"
                )
            os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # NCCL is not in use yet
        elif allocator.switch() and not getattr(model_config, "enable_sleep_mode", False):
            logger.warning(
                "MEMSAVER_VLLM=1 has no effect without sleep mode; start the engine with --enable-sleep-mode"
            )
        init(self, vllm_config, *args, **kwargs)

    wrap(module.Worker, "__init__", decide)
    module.Worker.memsaver = _answer
    for name, method in asleep.METHODS.items():
        setattr(module.Worker, name, method)


def _add_backend(module: ModuleType) -> None:
    """Add our backend of the sleep mode, which is chosen by name or by ``MEMSAVER_VLLM``."""
    factory = module.SleepModeBackendFactory
    factory.register_backend(allocator.BACKEND, "memsaver_core.compat.vllm.backend", "MemsaverBackend")
    wrap(factory, "create_backend", _if_enabled(lambda *_, **__: factory.get_backend_class(allocator.BACKEND)()))


def _our_allocator(_get_instance: Function) -> MemsaverAllocator:
    from vllm.device_allocator.cumem import CuMemAllocator

    if CuMemAllocator.instance not in (None, worker_memory):
        raise ConfigurationError(
            "vLLM's own allocator is in use in this process already; start the engine in a new one"
        )
    CuMemAllocator.instance = worker_memory
    return worker_memory


def _make_cublas_workspaces() -> None:
    """Have torch allocate cuBLAS's workspaces of the current stream under the tag for scratch. torch allocates them at
    a stream's first matrix product, and captured graphs then hold their addresses."""
    if not process.backend().has_memory_pools:
        return
    with worker_memory.use_memory_pool(allocator.WORKSPACE), torch.inference_mode():
        square = torch.ones(16, 16, dtype=torch.bfloat16, device="cuda")
        torch.mm(square, square)
        torch.nn.functional.linear(square, square, square[0])


def _complete_device(init_device: Function, *args: Any, **kwargs: Any) -> Any:
    result = init_device(*args, **kwargs)
    _make_cublas_workspaces()
    communicators.warn_of_registered_graphs()
    return result


@contextmanager
def _with_workspaces_of_stream(graph_capture: Function, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Make the capture stream's cuBLAS workspaces before its first capture."""
    with graph_capture(*args, **kwargs) as context:
        _make_cublas_workspaces()
        yield context


def _ready(compile_or_warm_up_model: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    result = compile_or_warm_up_model(self, *args, **kwargs)
    if ms.core_settings().kv_cache_piece and (nbytes := getattr(self, "peak_activation_memory", 0)):
        # Put what vLLM's largest step needs into torch's cache, so that a KV cache that grows cannot take it.
        torch.empty(nbytes, dtype=torch.uint8, device=self.device)
    ms.prepare_backup()  # all that a sleep keeps is allocated by now, so host memory for it can be pinned
    return result


def _with_cache_alone(initialize_from_config: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Put only the cache itself under its tag, if vLLM uses the cache's pool also for what it makes beside the cache:
    attention metadata and block tables are written once, and would be lost with the cache."""
    context = getattr(self, "_maybe_get_memory_pool_context", None)
    if context is None or not _tags_cache_alone(getattr(self, "model_runner", None)):
        return initialize_from_config(self, *args, **kwargs)
    self._maybe_get_memory_pool_context = lambda tag: context(allocator.RUNTIME if tag == KV_CACHE else tag)
    worker_memory.tags_cache_alone = True
    try:
        return initialize_from_config(self, *args, **kwargs)
    finally:
        worker_memory.tags_cache_alone = False
        del self._maybe_get_memory_pool_context


def _tags_cache_alone(runner: Any) -> bool:
    """Return whether the functions in which this runner allocates the cache are wrapped."""
    initialize = getattr(runner, "initialize_kv_cache", None)
    if runner is None or (initialize and "kv_cache_allocation_context" in inspect.signature(initialize).parameters):
        return False  # vLLM separates the two itself
    own = getattr(type(runner), "_allocate_kv_cache_tensors", None)
    successor = getattr(sys.modules.get("vllm.v1.worker.gpu.attn_utils"), "_allocate_kv_cache", None)
    return hasattr(successor if own is None else own, "_memsaver_wraps")


def _asleep(sleep: Function, self: Any, level: int = 1) -> None:
    """Sleep without saving the buffers of weights that are released already; vLLM has saved them before."""
    with _rank.progress.answering():  # the service sees that this rank is at work
        sleep(self, 1 if level == 2 and weights_are_released() else level)


def _without_early_buffers(wake_up: Function, self: Any, tags: list[str] | None = None) -> Any:
    """Wake up without writing buffers that vLLM saved at level 2 into weights that are still released."""
    if tags is None or allocator.WEIGHTS in tags or not weights_are_released():
        return wake_up(self, tags)
    noted = _notes(self)
    vars(self).update({name: type(note)() for name, note in noted.items()})
    try:
        return wake_up(self, tags)
    finally:
        vars(self).update(noted)


# The worker as a rank: it answers ``collective_rpc("memsaver", args=(message,))`` by the rank protocol. A release runs
# inside vLLM's own sleep, and a resume inside its wake-up, so that vLLM's state always fits the memory's.

#: The beginnings of names of attributes of ``Worker``, which a sleep at level 2 sets and a wake-up uses once: saved
#: buffers and parameters, and whether a draft model must compute its buffers again.
_NOTES = ("_sleep_saved_", "_sleep_rebuild_")


class _WorkerRank(Rank):
    """The worker of this process. ``Move("release", ...)`` is sent to a hibernated one only, and bypasses ``sleep``."""

    worker: Any = None

    def __init__(self) -> None:
        super().__init__()
        #: The result of the expected release; None until the worker was put to sleep.
        self._outcome: OperationReport | Failure | None = None
        #: The notes that the worker used up in the last message, if that was a resume.
        self._used: dict[str, Any] = {}

    def enabled(self) -> bool:
        return worker_memory.enabled

    def carry_out(self, request: protocol.Request) -> Result:
        used, self._used = self._used, {}
        match request:
            case protocol.Move("release"):
                # Another rank could not resume, so this one releases again: its next resume needs the notes again.
                vars(self.worker).update(used)
            case protocol.ExpectRelease(memory):
                self._expect(memory)
                return None
            case protocol.TakeOutcome():
                return self._take_outcome()
            case protocol.SleepNow(memory, level):
                self._expect(memory)
                return self._sleep(level)
            case protocol.Resize(pages):
                cache_memory.resize(self.worker.model_runner, pages)
                return OperationReport(operation="resume")
        return super().carry_out(request)

    def _expect(self, request: MemoryRequest) -> None:
        """Have the worker's next sleep release as ``request`` say."""
        self._outcome = None
        worker_memory.override = partial(self._release_asleep, request)

    def _release_asleep(self, request: MemoryRequest) -> None:
        """Release inside the worker's sleep, which must not see the error: the service undoes the release."""
        try:
            self._outcome = self.release_own(request)
        except Exception as error:
            self._outcome = Failure.of(error, self._failed_phase)

    def _take_outcome(self) -> Result:
        worker_memory.override = None
        outcome, self._outcome = self._outcome, None
        return outcome

    def _sleep(self, level: int) -> Result:
        try:
            self.worker.sleep(level)
        except Exception:
            if self._outcome is None:
                raise
            logger.exception("the memory was released, but vLLM's worker failed after that")
        return self._take_outcome()

    def resume(self, request: Tagged) -> Result:
        """Resume inside the worker's wake-up, which must see an error, so that it does not write what it has saved."""
        self._used = _notes(self.worker)
        reports: list[OperationReport] = []
        worker_memory.override = lambda: reports.append(self.followed(partial(ms.resume_with, request)))
        try:
            # If nothing stays asleep, tags are left out, so that vLLM knows.
            tags = request.tags
            part = tags and any(each.released_bytes and each.tag not in tags for each in ms.status().tags)
            self.worker.wake_up(list(tags) if part else None)
        finally:
            worker_memory.override = None
        return reports[0] if reports else None


_rank = _WorkerRank()


def _answer(worker: Any, message: Plain) -> Plain:
    """``Worker.memsaver``: answer one message of the rank protocol. Never raises."""
    _rank.worker = worker
    return _rank.answer(message)


def _notes(worker: Any) -> dict[str, Any]:
    """Return the notes of the worker that it has not used; ``vars(worker).update(...)`` puts them back. Copies, because
    vLLM may clear its own in place."""
    return {name: copy(note) for name, note in vars(worker).items() if name.startswith(_NOTES) and note}


# Functions that return the tag for the allocations of a call; None if vLLM tags them itself, or there will be none.


def _cache_tag(*_: Any, **__: Any) -> str | None:
    # None while vLLM measures how much cache it needs.
    return KV_CACHE if worker_memory.tags_cache_alone else None


def _workspace_tag(manager: Any, required_bytes: int = 0, *_: Any, **__: Any) -> str | None:
    # Called in every layer, so it is cheap.
    if hasattr(manager, "_alloc_context") or manager._locked:
        return None
    held = manager._current_workspaces
    if all(each is not None and each.numel() * each.element_size() >= required_bytes for each in held):
        return None
    process.backend().forget_pools(allocator.WORKSPACE)  # so that the smaller buffer returns to the driver
    return allocator.WORKSPACE


def _sampling_tag(logits: Any, *_: Any, **__: Any) -> str | None:
    """Return the tag of the buffer that vLLM keeps for each device and never frees."""
    if (cache := getattr(sys.modules[SAMPLING], "_TRITON_BUFFER_CACHE", None)) is None:
        return None
    held = cache.get((logits.device, logits.dtype, logits.shape[-1]))
    needed = min(logits.shape[0], _multiprocessors(logits.device.index))
    return None if held is not None and held.shape[0] >= needed else allocator.WORKSPACE


@functools.lru_cache
def _multiprocessors(device: int | None) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _flashinfer_tag(builder: Any = None, *_: Any, **__: Any) -> str | None:
    """Return the tag of workspaces that are made at first use and then kept: the module's, and one of each builder."""
    names = vars(sys.modules[FLASHINFER] if builder is None else builder)
    held = names.get("trtllm_workspace_buffer" if builder is None else "_workspace_buffer", "?")
    return allocator.WORKSPACE if held is None else None


# All-reduces. In vLLM a captured all-reduce reads its input in place, in the memory of every rank's graphs. The ranks
# share that by CUDA IPC, so it could not be released. Here a captured all-reduce first copies its input into the buffer
# that the ranks share from the start, as vLLM does outside of graphs; and that buffer is virtual memory.

#: Bytes of an entry of ``CustomAllreduce.rank_data``: eight pointers (``RankData`` in csrc/custom_all_reduce.cuh).
ENTRY_BYTES = 64

#: The buffers of this process, in the order in which they were made.
_buffers: list[PeerBuffers] = []


def _with_filled_table(init: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Make every entry of the table point to the shared buffer; each captured all-reduce reads one entry. vLLM fills
    the first entry when the object is made, and one for each captured all-reduce after the capture."""
    _under(allocator.RUNTIME)(init, self, *args, **kwargs)
    if self.disabled:
        return
    entries = self.rank_data.view(torch.int64).view(-1, ENTRY_BYTES // 8)
    if entries[0, : self.world_size].tolist() != list(self.buffer_ptrs):
        raise UnsupportedError(
            "this version of vLLM keeps another table of its custom all-reduce's buffers; start it with "
            "--disable-custom-all-reduce, or without MEMSAVER_VLLM=1"
        )
    entries[1:] = entries[0]


def _from_shared_buffer(all_reduce: Function, self: Any, inp: Any, *, out: Any = None, registered: bool = False) -> Any:
    return all_reduce(self, inp, out=out, registered=False)


def _virtual(
    _create_shared_buffer: Function, size_in_bytes: int, group: Any = None, uncached: bool | None = False
) -> list[int]:
    def gather(value: Any) -> list[Any]:
        values = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(values, value, group=group)
        return values

    sockets = PeerSockets(torch.distributed.get_rank(group), gather)
    buffers = PeerBuffers(size_in_bytes, torch.cuda.current_device(), sockets)
    ranks = torch.distributed.get_process_group_ranks(group)
    name = f"vllm:custom_all_reduce_{len(_buffers)}:{','.join(map(str, ranks))}"
    communicators.register_buffers(name, buffers)
    _buffers.append(buffers)
    return buffers.addresses


def _forget(free_shared_buffer: Function, pointers: list[int], group: Any = None, rank: int | None = None) -> None:
    """Free buffers that are not ours. vLLM calls this as the worker ends, when the driver frees ours."""
    if not any(buffers.addresses == pointers for buffers in _buffers):
        free_shared_buffer(pointers, group, rank)


def _without_unused_buffer(init: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Free the buffer of symmetric memory, which every rank has mapped, if vLLM finds that it cannot use it."""
    init(self, *args, **kwargs)
    if self.disabled:
        vars(self).pop("buffer", None)


_RUNNER = {
    "GPUModelRunner.__init__": _under(allocator.RUNTIME),
    "GPUModelRunner._allocate_kv_cache_tensors": _under(_cache_tag),
    "GPUModelRunner.allocate_uniform_kv_caches": _under(_cache_tag),
    "GPUModelRunner.init_fp8_kv_scales": cache_memory.without_cache,
}
#: By module. One that a version of vLLM lacks is never imported.
WRAPPERS: dict[str, dict[str, Function]] = {
    "vllm.device_allocator.cumem": {"CuMemAllocator.get_instance": _our_allocator},
    "vllm.platforms.interface": {"Platform.get_global_graph_pool": lambda _get, _platform: worker_memory.graph_pool()},
    "vllm.v1.worker.gpu_model_runner": _RUNNER,
    "vllm.v1.worker.gpu.model_runner": _RUNNER,  # its successor
    "vllm.v1.worker.gpu.attn_utils": {"_allocate_kv_cache": _under(_cache_tag)},
    "vllm.v1.worker.workspace": {"WorkspaceManager._ensure_workspace_size": _under(_workspace_tag)},
    SAMPLING: {"apply_top_k_top_p_triton": _under(_sampling_tag)},
    FLASHINFER: {
        "_get_trtllm_workspace_buffer": _under(lambda *_, **__: _flashinfer_tag()),
        "FlashInferMetadataBuilder._get_workspace_buffer": _under(_flashinfer_tag),
    },
    "vllm.distributed.parallel_state": {"graph_capture": _with_workspaces_of_stream},
    "vllm.distributed.device_communicators.custom_all_reduce": {
        "CustomAllreduce.__init__": _with_filled_table,
        "CustomAllreduce.all_reduce": _from_shared_buffer,
        "CustomAllreduce.register_graph_buffers": lambda _register, _self: None,
        "CustomAllreduce.create_shared_buffer": _virtual,
        "CustomAllreduce.free_shared_buffer": _forget,
    },
    "vllm.distributed.device_communicators.symm_mem": {"SymmMemCommunicator.__init__": _without_unused_buffer},
    "vllm.v1.worker.gpu_worker": {
        "Worker.init_device": _complete_device,
        "Worker.initialize_from_config": _with_cache_alone,
        "Worker.compile_or_warm_up_model": _ready,
        "Worker.sleep": _asleep,
        "Worker.wake_up": _without_early_buffers,
    },
}
