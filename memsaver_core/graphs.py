"""CUDA graphs whose memory is under a tag."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from memsaver_core import _process
from memsaver_core.policies import PolicyLike, policy_for


class GraphPool:
    """Memory that several graphs share, under one tag; pass it to ``graph``.

    As with ``torch.cuda.graph_pool_handle``: graphs that share a pool must be replayed one at a time, and a later one
    may overwrite what an earlier one left in it.
    """

    def __init__(self, tag: str = "cuda_graph", *, restore: PolicyLike | None = None) -> None:
        policy = policy_for(tag, restore).value
        self._pool: Any = None
        if _process.enabled() and _process.driver_name() == "cuda":
            from memsaver_core._cuda_region import new_graph_pool

            _process.saver()
            self._pool = new_graph_pool(torch.cuda.current_device(), tag, policy)

    @property
    def id(self) -> Any:
        """torch's name of the pool; None with the saver disabled."""
        return None if self._pool is None else self._pool.id


def graph(
    cuda_graph: torch.cuda.CUDAGraph,
    *,
    tag: str = "cuda_graph",
    restore: PolicyLike | None = None,
    pool: GraphPool | None = None,
    stream: torch.cuda.Stream | None = None,
    capture_error_mode: str = "global",
) -> AbstractContextManager[Any]:
    """Capture into ``cuda_graph``, as ``torch.cuda.graph``, with the graph's own memory under ``tag``.

    The content of a graph's memory is kept by default: it holds state that is written at capture and never again.
    With the saver disabled this is ``torch.cuda.graph``.

    Args:
        cuda_graph: the graph to capture into.
        tag: tag of the graph's memory.
        restore: what a resume owes to it; ``host`` for the tag ``cuda_graph``.
        pool: memory to share with other graphs; by default each graph has its own.
        stream: as for ``torch.cuda.graph``.
        capture_error_mode: as for ``torch.cuda.graph``.
    """
    own = pool if pool is not None else GraphPool(tag, restore=restore)
    cuda_graph._memsaver_pool = own  # type: ignore[attr-defined]  # the pool must live as long as the graph
    return torch.cuda.graph(cuda_graph, pool=own.id, stream=stream, capture_error_mode=capture_error_mode)
