"""A region on CUDA: a torch memory pool on a pluggable allocator whose C functions are the native core's."""

from __future__ import annotations

import ctypes
import threading
import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch

from memsaver_core import _native

_lock = threading.Lock()
_stack = threading.local()
_allocators: dict[int, torch.cuda.memory.CUDAPluggableAllocator] = {}
_pools: dict[tuple[int, str, str], Pool] = {}
_pools_while_released: dict[tuple[int, str, str], tuple[int, Pool]] = {}
_region_pool_ids: set[tuple[int, ...]] = set()
_releases: dict[str, int] = {}

_DEFAULT_POOL_ID = (0, 0)


class Pool:
    """A torch memory pool. Once nothing refers to it, what is free in it goes back with torch's caches.

    torch's own object is never destroyed: where that happens while any pool is in use or a graph is captured, in
    whichever thread, torch ends the process.
    """

    def __init__(self, device: int, allocator: Any = None) -> None:
        with torch.cuda.device(device):
            self.torch_pool = torch.cuda.MemPool(allocator)
        self.id = self.torch_pool.id
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.torch_pool))
        weakref.finalize(self, torch._C._cuda_releasePool, device, self.id).atexit = False


def note_release(tags: list[str]) -> None:
    """Remember that these tags were released once more."""
    with _lock:
        for tag in tags:
            _releases[tag] = _releases.get(tag, 0) + 1


def new_pool(device: int, tag: str, restore: str) -> Pool:
    """A torch memory pool whose segments are allocations of the saver."""
    number = _native.allocator_for(tag, restore)
    allocator = _allocators.get(number)
    if allocator is None:
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            _native.__file__, f"memsaver_torch_malloc_{number}", "memsaver_torch_free"
        )
        _allocators[number] = allocator  # torch calls into it for as long as any segment lives
    return Pool(device, allocator.allocator())


def new_graph_pool(device: int, tag: str, restore: str) -> Pool:
    """A pool for CUDA graphs. All of its segments are content: replays use blocks that torch holds free."""
    with _lock:
        return new_pool(device, tag, restore)


def _new_region_pool(device: int, tag: str, restore: str) -> Pool:
    pool = new_pool(device, tag, restore)
    _region_pool_ids.add((pool.id[0], pool.id[1]))
    return pool


def _pool_for(saver: _native.Saver, device: int, tag: str, restore: str) -> Pool:
    key = (device, tag, restore)
    released = any(each["tag"] == tag and each["released_bytes"] > 0 for each in saver.status()["tags"])
    with _lock:
        if not released:
            # Its free segments go back to the driver with it; those in use stay until their tensors end.
            _pools_while_released.pop(key, None)
            if key not in _pools:
                _pools[key] = _new_region_pool(device, tag, restore)
            return _pools[key]
        # torch may hold free blocks of segments that are released now, and would hand them out without asking us. So
        # what is allocated while the tag is released comes from a pool that has none.
        epoch = _releases.get(tag, 0)
        present = _pools_while_released.get(key)
        if present is None or present[0] != epoch:
            present = _pools_while_released[key] = (epoch, _new_region_pool(device, tag, restore))
        return present[1]


def forget_pools(tag: str | None = None, restore: str | None = None) -> bool:
    """Let regions of ``tag`` and policy ``restore``, of all where they are None, begin anew; whether there were any.

    What nobody uses of their pools is the driver's again after the next ``torch.cuda.empty_cache()``; the rest stays
    under its tag until its tensors end.
    """
    with _lock:
        keys = [key for key in {*_pools, *_pools_while_released} if tag in (None, key[1]) and restore in (None, key[2])]
        for key in keys:
            _pools.pop(key, None)
            _pools_while_released.pop(key, None)
    return bool(keys)


class CudaRegion:
    """Routes torch's allocations of this thread on ``device`` to the saver, under ``tag``."""

    def __init__(self, saver: _native.Saver, device: int | None, tag: str, restore: str) -> None:
        self._saver = saver
        self._device = torch.cuda.current_device() if device is None else device
        self._tag = tag
        self._restore = restore
        self._pool: Pool | None = None
        self._routing: AbstractContextManager[Any] | None = None

    def __enter__(self) -> CudaRegion:
        self._pool = _pool_for(self._saver, self._device, self._tag, self._restore)
        outer = _regions()
        if not outer and not torch.cuda.is_current_stream_capturing():
            # While a pool is in use, torch does not give its other caches back to make room for it.
            torch.cuda.empty_cache()
        # Which of two nested pools torch prefers differs between its versions, so only one is ever in use.
        if outer:
            outer[-1]._leave()
        try:
            self._route()
        except BaseException:
            if outer:
                outer[-1]._route()
            raise
        outer.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._leave()
        regions = _regions()
        regions.pop()
        if regions:
            regions[-1]._route()

    def _route(self) -> None:
        assert self._pool is not None
        routing = torch.cuda.use_mem_pool(self._pool.torch_pool, device=self._device)
        routing.__enter__()
        self._routing = routing

    def _leave(self) -> None:
        if self._routing is not None:
            self._routing.__exit__(None, None, None)
            self._routing = None


def _regions() -> list[CudaRegion]:
    if not hasattr(_stack, "regions"):
        _stack.regions = []
    regions: list[CudaRegion] = _stack.regions
    return regions


def dead_ranges(saver: _native.Saver) -> list[tuple[int, int]]:
    """Ranges (address, bytes) of the saver's memory that torch's allocator holds free, in address order.

    Only of torch's default pool, whose segments a preload library may have made the saver's, and of regions' pools: all
    others may be of graphs, which use their free blocks at every replay.
    """
    if not torch.cuda.is_initialized() or torch.cuda.get_allocator_backend() != "native":
        return []
    dead = []
    for segment in torch.cuda.memory_snapshot():
        pool = tuple(segment["segment_pool_id"])
        if not saver.owns(segment["address"]) or (pool != _DEFAULT_POOL_ID and pool not in _region_pool_ids):
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                dead.append((address, block["size"]))
            address += block["size"]
    return sorted(dead)
