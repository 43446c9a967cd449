"""torch memory pools whose segments are allocations of the saver."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from memsaver_core import _native
from memsaver_core.backends.base import Backend

_DEFAULT_POOL_ID = (0, 0)


class Pool:
    """A torch memory pool. Once nothing refers to it, its free memory goes back with torch's caches.

    torch's own object is never destroyed: if that happens while any thread uses a pool or captures a graph, torch ends
    the process.
    """

    def __init__(self, device: int, allocator: Any = None) -> None:
        with torch.cuda.device(device):
            self.torch_pool = torch.cuda.MemPool(allocator)
        self.id: tuple[int, int] = self.torch_pool.id
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.torch_pool))
        weakref.finalize(self, torch._C._cuda_releasePool, device, self.id).atexit = False


class PooledBackend(Backend):
    """The part of the CUDA backend that keeps the pools of this process, by device, tag and policy."""

    has_memory_pools = True

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._allocators: dict[int, torch.cuda.memory.CUDAPluggableAllocator] = {}
        self._pools: dict[tuple[int, str, str], Pool] = {}
        self._pools_while_released: dict[tuple[int, str, str], tuple[int, Pool]] = {}
        self._region_pool_ids: set[tuple[int, ...]] = set()
        self._releases: dict[str, int] = {}

    def note_release(self, tags: Sequence[str]) -> None:
        with self._lock:
            for tag in tags:
                self._releases[tag] = self._releases.get(tag, 0) + 1

    def new_graph_pool(self, tag: str, restore: str) -> Pool:
        # Not among the pools of regions: all of its segments are content, as replays use blocks that torch holds free.
        with self._lock:
            return self._new_pool(torch.cuda.current_device(), tag, restore)

    def pool_for(self, saver: _native.Saver, device: int, tag: str, restore: str) -> Pool:
        """Return the pool that a region allocates from now."""
        key = (device, tag, restore)
        released = any(each["tag"] == tag and each["released_bytes"] > 0 for each in saver.status()["tags"])
        with self._lock:
            if not released:
                # Its free segments go back to the driver with it; those in use stay until their tensors end.
                self._pools_while_released.pop(key, None)
                if key not in self._pools:
                    self._pools[key] = self._new_region_pool(device, tag, restore)
                return self._pools[key]
            # torch may hold free blocks in segments that are released now, and would hand them out without asking us.
            # So allocations made while the tag is released come from a pool that has none.
            epoch = self._releases.get(tag, 0)
            present = self._pools_while_released.get(key)
            if present is None or present[0] != epoch:
                present = (epoch, self._new_region_pool(device, tag, restore))
                self._pools_while_released[key] = present
            return present[1]

    def forget_pools(self, tag: str | None = None, restore: str | None = None) -> bool:
        with self._lock:
            known = {*self._pools, *self._pools_while_released}
            keys = [key for key in known if tag in (None, key[1]) and restore in (None, key[2])]
            for key in keys:
                self._pools.pop(key, None)
                self._pools_while_released.pop(key, None)
        return bool(keys)

    def dead_ranges(self, saver: _native.Saver) -> list[tuple[int, int]]:
        """Return free blocks of the pools of regions, and of torch's default pool, which a preload library may fill.

        Any other pool may belong to graphs, which use its free blocks at every replay.
        """
        if not torch.cuda.is_initialized() or torch.cuda.get_allocator_backend() != "native":
            return []
        dead = []
        for segment in torch.cuda.memory_snapshot():
            pool = tuple(segment["segment_pool_id"])
            if not saver.owns(segment["address"]) or (pool != _DEFAULT_POOL_ID and pool not in self._region_pool_ids):
                continue
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    dead.append((address, block["size"]))
                address += block["size"]
        return sorted(dead)

    def _new_region_pool(self, device: int, tag: str, restore: str) -> Pool:
        pool = self._new_pool(device, tag, restore)
        self._region_pool_ids.add(pool.id)
        return pool

    def _new_pool(self, device: int, tag: str, restore: str) -> Pool:
        number = _native.allocator_for(tag, restore)
        allocator = self._allocators.get(number)
        if allocator is None:
            allocator = torch.cuda.memory.CUDAPluggableAllocator(
                _native.__file__, f"memsaver_torch_malloc_{number}", "memsaver_torch_free"
            )
            self._allocators[number] = allocator  # torch calls into it for as long as any segment lives
        return Pool(device, allocator.allocator())
