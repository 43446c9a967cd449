"""vLLM's allocator interface (``CuMemAllocator``) over memsaver's regions, and whether an engine's workers use it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

import memsaver_core as ms
from memsaver_core import process
from memsaver_core.contract.errors import ConfigurationError
from memsaver_core.contract.policies import RestorePolicy, policy_for
from memsaver_core.resizing import KV_CACHE, piece_bytes

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

#: The only tags that a wake-up by tags may leave asleep. All others come back with any wake-up.
DEFERRABLE = frozenset({WEIGHTS, KV_CACHE})


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


@dataclass
class WorkerConfig:
    """What was decided for the worker of this process: whether its memory is memsaver's; and, while the KV cache is
    made, whether its tag is for the cache alone, or for all that is made."""

    enabled: bool = False
    tags_cache_alone: bool = False


#: Of this process: vLLM has one worker in each.
worker_config = WorkerConfig()


class MemsaverAllocator:
    """Replaces vLLM's memory allocator. There is one in a process, made by ``CuMemAllocator.get_instance()``. Memory
    allocated inside ``use_memory_pool(tag)`` is released by ``sleep`` and resumed at the same addresses by ``wake_up``,
    in any order; they raise as ``memsaver_core.release`` and ``resume``."""

    default_tag = "default"

    def __init__(self) -> None:
        self._graphs: ms.GraphPool | None = None
        #: Called once, in place of the next ``sleep`` or ``wake_up``.
        self.override: Callable[[], object] | None = None

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Put what torch allocates inside under ``tag``; pools nest."""
        tag = tag or self.default_tag
        with _without_expandable_segments(), ms.region(tag, restore=policy_of(tag), chunk_bytes=piece_bytes(tag)):
            yield

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Give the pool that CUDA graphs are to be captured into."""
        yield self.graph_pool()

    def graph_pool(self) -> tuple[int, int]:
        """Return torch's id of the one pool for CUDA graphs, under the tag ``cuda_graph``."""
        if self._graphs is None:
            self._graphs = ms.GraphPool(CUDA_GRAPH)
        return cast(tuple[int, int], self._graphs.id)

    def sleep(self, offload_tags: Sequence[str] | str | None = None) -> None:
        """Release every tag; keep the content of ``offload_tags``, and of tags that vLLM cannot write again."""
        if self._overridden():
            return
        given = (self.default_tag,) if offload_tags is None else offload_tags
        kept = frozenset((given,) if isinstance(given, str) else given)
        ms.release(restore={tag: policy_at_sleep(tag, kept) for tag in process.known_tags()})

    def discard(self, tags: Sequence[str] | str) -> None:
        """Release ``tags`` without keeping their content. Tags that do not exist are ignored."""
        known = process.known_tags()
        names = [tag for tag in ((tags,) if isinstance(tags, str) else tags) if tag in known]
        if names:
            ms.release(names, restore={tag: policy_at_sleep(tag, frozenset()) for tag in names})

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Resume ``tags`` and every tag that is not deferrable; all tags if None."""
        if self._overridden():
            return
        if tags is None:
            ms.resume()
            return
        names = [tag for tag in process.known_tags() if tag in tags or tag not in DEFERRABLE]
        if names:
            ms.resume(names)

    def _overridden(self) -> bool:
        override, self.override = self.override, None
        if override is not None:
            override()
        return override is not None

    def get_current_usage(self) -> int:
        """Return the bytes that vLLM itself put under tags, by which it sees if another engine is in this process."""
        ours = KEPT | {WORKSPACE}
        return sum(tag.bytes for tag in ms.status().tags if tag.tag not in ours)

    def release_pools(self) -> None:
        """Drop the pools of an engine that has ended. Memory that no tensor uses goes back to the driver."""
        self._graphs = None
        process.backend().forget_pools()

    close = release_pools


def vllm_allocator() -> MemsaverAllocator:
    from vllm.device_allocator.cumem import CuMemAllocator

    return cast(MemsaverAllocator, CuMemAllocator.get_instance())


def policy_of(tag: str) -> RestorePolicy:
    """Return the policy of regions of ``tag``. Tags that we do not know are discarded unless a sleep keeps them."""
    return policy_for(tag, RestorePolicy.HOST if tag in KEPT else None)


def policy_at_sleep(tag: str, offloaded: frozenset[str]) -> RestorePolicy:
    if tag in KEPT or tag in offloaded:
        return RestorePolicy.HOST
    policy = policy_of(tag)
    return RestorePolicy.DISCARD if policy == RestorePolicy.HOST else policy


@contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """Switch expandable segments off inside the block, as torch allocates them outside of every pool."""
    before = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if not re.search(r"expandable_segments\s*:\s*(True|1)", before, re.IGNORECASE) or not torch.cuda.is_available():
        yield
        return
    inside = re.sub(r"expandable_segments\s*:\s*\w+", "expandable_segments:False", before)
    torch.cuda.memory._set_allocator_settings(inside)  # which resets every option that is not named
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(before)
