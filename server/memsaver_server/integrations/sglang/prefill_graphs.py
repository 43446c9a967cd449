"""SGLang's prefill graphs, with their memory under the tag of its other graphs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

#: SGLang's variable: the memory of graphs is released, too.
VARIABLE = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
TAG = "cuda_graph"
BACKEND = "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend"


def are_released() -> bool:
    """Return whether SGLang is asked to release the memory of graphs."""
    return os.environ.get(VARIABLE, "").lower() in ("1", "true")


def initialize(
    original: Callable[..., None], backend: Any, *arguments: Any, enable_memory_saver: bool = False, **named: Any
) -> None:
    """A hook around ``BreakableCudaGraphBackend.__init__``, which refuses to start if the memory of graphs is released.

    A prefill is a sequence of graphs, each captured without torch_memory_saver's ``cuda_graph``. All of them take their
    memory from the pool whose id the backend has; here it is the pool of the graphs captured with ``cuda_graph``.
    """
    original(backend, *arguments, enable_memory_saver=False, **named)
    if enable_memory_saver:
        from memsaver_core.compat.torch_memory_saver.entrypoint import graph_pool

        pools = importlib.import_module("sglang.srt.model_executor.runner_utils.pool")
        pool = graph_pool(pools.get_or_create_global_graph_memory_pool(backend._device_module), TAG)
        backend._memsaver_pool = pool  # it must live as long as the graphs
        backend._pool = pool.id
