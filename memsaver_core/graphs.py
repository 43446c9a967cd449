"""CUDA graphs whose memory is under a tag."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any
from weakref import WeakSet

import torch

from memsaver_core import device_memory, process
from memsaver_core.policies import PolicyLike, policy_for

_alive: WeakSet[Any] = WeakSet()


def alive() -> list[torch.cuda.CUDAGraph]:
    """The graphs made by ``graph`` that still live."""
    return list(_alive)


def graph_memory_bytes(index: int) -> int:
    """What captured graphs hold of a device beside the memory of their tensors.

    Of graphs made by ``graph`` it is what the process's count of the device rose by at their capture, where NVML tells
    processes apart; to that comes what the driver holds for allocations inside of graphs. Others are not told apart.
    """
    own = sum(each._memsaver_own[1] for each in list(_alive) if each._memsaver_own[0] == index)
    return int(own) + device_memory.read_graph_pool(index)


class GraphPool:
    """Memory that several graphs share, under one tag; pass it to ``graph``.

    As with ``torch.cuda.graph_pool_handle``: graphs that share a pool must be replayed one at a time, and a later one
    may overwrite what an earlier one left in it.
    """

    def __init__(self, tag: str = "cuda_graph", *, restore: PolicyLike | None = None) -> None:
        policy = policy_for(tag, restore).value
        self._pool: Any = None
        if process.backend().has_memory_pools:
            process.saver()  # its allocator must be active before the pool allocates
            self._pool = process.backend().new_graph_pool(tag, policy)

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
    capture = torch.cuda.graph(cuda_graph, pool=own.id, stream=stream, capture_error_mode=capture_error_mode)
    return capture if own.id is None else _Measured(cuda_graph, capture)


class _Measured:
    """A capture that notes what the graph itself takes of the device."""

    def __init__(self, cuda_graph: Any, capture: AbstractContextManager[Any]) -> None:
        self._graph = cuda_graph
        self._capture = capture
        self._device = torch.cuda.current_device()
        self._graph._memsaver_own = (self._device, 0)
        _alive.add(cuda_graph)

    def __enter__(self) -> Any:
        entered = self._capture.__enter__()
        self._before = self._beside_tensors()
        return entered

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        suppressed = self._capture.__exit__(kind, error, traceback)
        self._graph._memsaver_own = (self._device, max(0, self._beside_tensors() - self._before))
        return suppressed

    def _beside_tensors(self) -> int:
        """What the process holds of the device and is neither a region nor torch's; 0 where NVML does not tell."""
        saver = process.saver()
        readings = device_memory.read_devices()
        own = next((each.process_bytes for each in readings if each.index == self._device), None)
        if own is None:
            return 0
        here = self._device
        # torch counts what is live in regions, whether it is mapped or not.
        unmapped = sum(
            tag["bytes_by_device"].get(here, 0) - tag["mapped_by_device"].get(here, 0) for tag in saver.status()["tags"]
        )
        return int(own + unmapped - torch.cuda.memory_reserved(here))
