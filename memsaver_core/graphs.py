"""CUDA graphs whose memory is under a tag."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from memsaver_core import process
from memsaver_core.contract.policies import PolicyLike, policy_for

#: Each graph made here that is alive, with its device and the bytes by which its capture grew this process's memory
#: there, beside tensors.
grown: WeakKeyDictionary[torch.cuda.CUDAGraph, tuple[int, int]] = WeakKeyDictionary()


class GraphPool:
    """Memory that several graphs share, under one tag; pass it to ``graph``. As with ``torch.cuda.graph_pool_handle``,
    they must be replayed one at a time, and each may overwrite what another left in it."""

    def __init__(self, tag: str = "cuda_graph", *, restore: PolicyLike | None = None) -> None:
        policy = policy_for(tag, restore).value
        self._pool: Any = None
        if process.backend().has_memory_pools:
            process.saver()  # its allocator must be active before the pool allocates
            self._pool = process.backend().new_graph_pool(tag, policy)

    @property
    def id(self) -> Any:
        """torch's id of the pool; None without memory pools (on the host driver, or with memsaver disabled)."""
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
    """Capture into ``cuda_graph``, as ``torch.cuda.graph`` does, with the graph's own memory under ``tag``.

    ``restore`` is its policy, by default that of the tag: ``host`` for ``cuda_graph``, as some content is written only
    at capture. ``pool`` is memory to share with other graphs; by default the graph has its own. The other arguments are
    those of ``torch.cuda.graph``; with memsaver disabled this does nothing else. Raises as ``region``.
    """
    own = pool if pool is not None else GraphPool(tag, restore=restore)
    cuda_graph._memsaver_pool = own  # type: ignore[attr-defined]  # the pool must live as long as the graph
    capture = torch.cuda.graph(cuda_graph, pool=own.id, stream=stream, capture_error_mode=capture_error_mode)
    return capture if own.id is None else _measured(cuda_graph, capture)


@contextmanager
def _measured(cuda_graph: torch.cuda.CUDAGraph, capture: AbstractContextManager[Any]) -> Iterator[None]:
    """Capture, and record what the graph itself takes of the device."""
    device = torch.cuda.current_device()
    grown[cuda_graph] = (device, 0)
    with capture:
        before = _bytes_beside_tensors(device)
        yield
    grown[cuda_graph] = (device, max(0, _bytes_beside_tensors(device) - before))


def _bytes_beside_tensors(device: int) -> int:
    """Return what this process holds of a device outside of regions and torch; 0 if NVML does not say."""
    saver = process.saver()
    own = process.backend().read_device(saver, device).process_bytes
    if own is None:
        return 0
    tags = saver.status()["tags"]
    # torch counts live allocations in regions, mapped or not.
    unmapped = sum(tag["bytes_by_device"].get(device, 0) - tag["mapped_by_device"].get(device, 0) for tag in tags)
    return int(own + unmapped - torch.cuda.memory_reserved(device))
