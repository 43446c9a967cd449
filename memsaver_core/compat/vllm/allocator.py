"""vLLM's allocator interface (``CuMemAllocator``) over memsaver's regions, and whether an engine's workers use it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import memsaver_core as ms
from memsaver_core import process
from memsaver_core.contract.errors import ConfigurationError
from memsaver_core.contract.policies import RestorePolicy, policy_for
from memsaver_core.resizing import piece_bytes

SWITCH = "MEMSAVER_VLLM"
BACKEND = "memsaver"

#: What the runner allocates besides weights, KV cache and scratch: input buffers, attention metadata, adapters. It is
#: written once or step by step and read later, so it is kept. Later versions of vLLM use the same name.
RUNTIME = "runtime"
CUDA_GRAPH = "cuda_graph"
WORKSPACE = "workspace"
WEIGHTS = "weights"

#: Tags that every sleep keeps, whatever its level: vLLM cannot write their content again.
KEPT = frozenset({RUNTIME, CUDA_GRAPH})


def switch() -> bool | None:
    """Return what ``MEMSAVER_VLLM`` says, None if it is not set; raise ConfigurationError if it is neither 1 nor 0."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{SWITCH}={value!r} is invalid; set it to 1 or 0")
    return None if value == "" else value == "1"


def is_wanted(model_config: Any) -> bool:
    """Return whether an engine of this configuration is to sleep by memsaver."""
    if not getattr(model_config, "enable_sleep_mode", False):
        return False
    backend = getattr(model_config, "sleep_mode_backend", "cumem")
    return backend == BACKEND or (backend == "cumem" and switch() is True)


class MemsaverAllocator:
    """Replaces vLLM's memory allocator: what is allocated inside ``use_memory_pool(tag)`` is under that tag, which
    ``MemsaverBackend`` releases and resumes.

    Attributes:
        enabled: whether the memory of this process's worker is memsaver's.
        tags_cache_alone: while the KV cache is made, whether its tag is for the cache alone, or for all that is made.
        override: called in place of the next release or resume by vLLM.
    """

    def __init__(self) -> None:
        self.enabled = self.tags_cache_alone = False
        self.override: Callable[[], object] | None = None
        self._graphs: ms.GraphPool | None = None

    def use_memory_pool(self, tag: str) -> AbstractContextManager[Any]:
        """Put what torch allocates inside under ``tag``; pools nest."""
        return ms.region(tag, restore=policy_of(tag), chunk_bytes=piece_bytes(tag))

    def cudagraph_pool(self) -> AbstractContextManager[tuple[int, int]]:
        """Give the pool that CUDA graphs are to be captured into."""
        return nullcontext(self.graph_pool())

    def graph_pool(self) -> tuple[int, int]:
        """Return torch's id of the one pool for CUDA graphs, under the tag ``cuda_graph``."""
        if self._graphs is None:
            self._graphs = ms.GraphPool(CUDA_GRAPH)
        return cast(tuple[int, int], self._graphs.id)

    def get_current_usage(self) -> int:
        """Return the bytes that vLLM itself put under tags, by which it sees if another engine is in this process."""
        ours = KEPT | {WORKSPACE}
        return sum(tag.bytes for tag in ms.status().tags if tag.tag not in ours)

    def release_pools(self) -> None:
        """Drop the pools of an engine that has ended. Memory that no tensor uses goes back to the driver."""
        self._graphs = None
        process.backend().forget_pools()


#: Of this process: vLLM has one worker in each.
worker_memory = MemsaverAllocator()


def policy_of(tag: str) -> RestorePolicy:
    """Return the policy of regions of ``tag``. Content under tags that we do not know is discarded."""
    return policy_for(tag, RestorePolicy.HOST if tag in KEPT else None)
