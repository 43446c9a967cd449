"""vLLM's allocator interface (``CuMemAllocator``) over memsaver's regions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core import process
from memsaver_core.compat.vllm.tags import (
    CUDA_GRAPH,
    DEFERRABLE,
    KEPT,
    WORKSPACE,
    policy_at_sleep,
    policy_of,
)


class MemsaverAllocator:
    """What vLLM calls its memory allocator, one in a process; made by ``CuMemAllocator.get_instance()``.

    Memory that is allocated inside ``use_memory_pool(tag)`` goes at ``sleep`` and comes back at the same addresses at
    ``wake_up``. Unlike vLLM's own, each call may be repeated, and in any order.
    """

    default_tag = "default"

    def __init__(self) -> None:
        self._graphs: ms.GraphPool | None = None
        #: What the next sleep or wake-up does in the place of what vLLM tells it; used up by it.
        self.instead: Callable[[], None] | None = None

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Put what torch allocates inside under ``tag``; pools nest."""
        with _without_expandable_segments(), tagged(tag or self.default_tag):
            yield

    @contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Give the pool that CUDA graphs are to be captured into."""
        yield self.graph_pool()

    def graph_pool(self) -> tuple[int, int]:
        """torch's name of the one pool for CUDA graphs, under the tag ``cuda_graph``."""
        if self._graphs is None:
            self._graphs = ms.GraphPool(CUDA_GRAPH)
        pool: tuple[int, int] = self._graphs.id
        return pool

    def sleep(self, offload_tags: Sequence[str] | str | None = None) -> None:
        """Release every tag: the content of ``offload_tags`` is kept, and that of tags that vLLM cannot write again.

        Raises:
            As ``memsaver_core.release``.
        """
        if self._do_instead():
            return
        given = (self.default_tag,) if offload_tags is None else offload_tags
        kept = frozenset((given,) if isinstance(given, str) else given)
        ms.release(restore={tag: policy_at_sleep(tag, kept) for tag in known_tags()})

    def discard(self, tags: Sequence[str] | str) -> None:
        """Release ``tags`` without their content. Nothing is asleep under a tag that does not exist."""
        names = [tag for tag in ((tags,) if isinstance(tags, str) else tags) if tag in known_tags()]
        if names:
            ms.release(names, restore={tag: policy_at_sleep(tag, frozenset()) for tag in names})

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Resume ``tags`` and all that need not wait for a tag of its own; everything where it is None.

        Raises:
            As ``memsaver_core.resume``.
        """
        if self._do_instead():
            return
        if tags is None:
            ms.resume()
            return
        names = [tag for tag in known_tags() if tag in tags or tag not in DEFERRABLE]
        if names:
            ms.resume(names)

    def _do_instead(self) -> bool:
        instead, self.instead = self.instead, None
        if instead is not None:
            instead()
        return instead is not None

    def get_current_usage(self) -> int:
        """Bytes that vLLM itself put under tags; it asks to learn whether another engine lives in this process."""
        ours = KEPT | {WORKSPACE}
        return sum(tag.bytes for tag in ms.status().tags if tag.tag not in ours)

    def release_pools(self) -> None:
        """Give up the pools: what no tensor uses goes back to the driver. The engine that used them has ended."""
        self._graphs = None
        process.backend().forget_pools()

    def close(self) -> None:
        """The same."""
        self.release_pools()


def tagged(tag: str) -> Any:
    """A region of one of vLLM's tags."""
    return ms.region(tag, restore=policy_of(tag))


def known_tags() -> list[str]:
    """The tags with memory under them."""
    saver = process.existing_saver()
    return saver.known_tags() if saver is not None else []


@contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """Switch expandable segments off for a while: torch takes such memory past every pool."""
    before = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if not re.search(r"expandable_segments\s*:\s*(True|1)", before, re.IGNORECASE) or not torch.cuda.is_available():
        yield
        return
    # torch resets every option that a new setting does not name.
    torch.cuda.memory._set_allocator_settings(
        re.sub(r"expandable_segments\s*:\s*\w+", "expandable_segments:False", before)
    )
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(before)
