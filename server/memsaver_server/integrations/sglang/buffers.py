"""Tags for what SGLang allocates outside of its regions as it starts. The content under ``runtime`` is kept: LoRA's
pool, attention metadata, inputs and outputs of graphs. The scratch of attention kernels, under ``workspace``, is not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core.compat.patching import wrap

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
RUNNER = "sglang.srt.model_executor"
ATTENTION = "sglang.srt.layers.attention.base_attn_backend"

#: Whether an engine whose memory can be released is starting. What is allocated later is no concern of ours: it may be
#: freed at any time, and a region costs time in each step.
_starting = ContextVar("_starting", default=False)


def hooks() -> dict[str, Callable[..., Any]]:
    """Return the hooks around the functions of SGLang that allocate these."""
    return {
        f"{SCHEDULER}.init_model_worker": _start,
        f"{SCHEDULER}.init_all_attention_backends": _initialize_backends,
        "sglang.srt.runtime_context.RuntimeContext.get_buffer": _get_buffer,
        f"{RUNNER}.model_runner.ModelRunner.init_lora_manager": _allocate_runtime,
        f"{RUNNER}.cuda_graph_buffer_registry.CudaGraphBufferRegistry.register_slot": _allocate_runtime,
        f"{RUNNER}.graph_shared_output.GraphSharedOutput.get_logits_buffer": _allocate_runtime,
    }


def _start(original: Callable[[Any], None], scheduler: Any) -> None:
    token = _starting.set(scheduler.server_args.enable_memory_saver)
    try:
        original(scheduler)
    finally:
        _starting.reset(token)


def _allocate(tag: str, restore: str | None, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call ``original`` in a region, except during a capture, whose memory is that of its graph."""
    if not _starting.get() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return original(*arguments, **named)
    with ms.region(tag, restore=restore):
        return original(*arguments, **named)


_allocate_runtime = partial(_allocate, "runtime", "host")


def _initialize_backends(original: Callable[[Any], None], scheduler: Any) -> None:
    """Backends allocate for graphs, too, in a method that is called later."""
    _allocate_runtime(original, scheduler)
    for backend in _backends():
        if "init_cuda_graph_state" in vars(backend):
            wrap(backend, "init_cuda_graph_state", _allocate_runtime)


def _backends() -> Iterator[type[Any]]:
    """Yield the classes of SGLang's attention modules, as those for several steps of a draft model have no common base;
    and the backends of other modules."""
    package = ATTENTION.rpartition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}."):
            yield from (each for each in vars(module).values() if isinstance(each, type))
    yield from _subclasses(importlib.import_module(ATTENTION).AttentionBackend)


def _subclasses(of: type[Any]) -> Iterator[type[Any]]:
    for each in of.__subclasses__():
        yield each
        yield from _subclasses(each)


def _get_buffer(original: Callable[..., Any], context: Any, name: str, *arguments: Any, **named: Any) -> Any:
    if not name.endswith("_workspace"):
        return original(context, name, *arguments, **named)
    return _allocate("workspace", None, original, context, name, *arguments, **named)
