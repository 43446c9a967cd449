"""What torch's allocator holds of a device, as torch itself counts it."""

from __future__ import annotations

from functools import lru_cache

import torch

from memsaver_core import process
from memsaver_core.reports import TorchMemory

#: With more blocks than this in torch's allocator, listing them would hold the whole process up for too long.
LISTED_BLOCKS = 2048


def read_torch_memory(index: int) -> TorchMemory:
    """What torch holds of device ``index``. Calls no driver; all zero where torch does not use CUDA."""
    if process.driver_name() != "cuda" or not torch.cuda.is_initialized():
        return TorchMemory(0, 0)
    stats = torch.cuda.memory_stats_as_nested_dict(index)
    if not stats:  # another allocator is in torch's place
        return TorchMemory(0, None)
    mark = tuple(stats[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes", "segment", "active"))
    blocks = mark[3] + stats["inactive_split"]["all"]["current"]
    return TorchMemory(mark[0], _cached_bytes(index, mark) if blocks <= LISTED_BLOCKS else None)


@lru_cache(maxsize=64)
def _cached_bytes(index: int, _mark: tuple[int, ...]) -> int:
    """What torch only caches of a device, outside of regions. The same until ``_mark`` changes."""
    saver = process.existing_saver()
    return sum(
        segment["total_size"] - segment["active_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == index and not (saver is not None and saver.owns(segment["address"]))
    )
