"""A region on CUDA: a torch memory pool on a pluggable allocator whose C functions are the native core's."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from memsaver_core.backends.base import Stack


class Pool:
    """A torch memory pool. Once nothing refers to it, its free memory goes back with torch's caches. torch's own object
    is never destroyed: if that happens while any thread uses a pool or captures a graph, torch ends the process."""

    def __init__(self, device: int, allocator: Any = None) -> None:
        with torch.cuda.device(device):
            self.torch_pool = torch.cuda.MemPool(allocator)
        self.id: tuple[int, int] = self.torch_pool.id
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.torch_pool))
        weakref.finalize(self, torch._C._cuda_releasePool, device, self.id).atexit = False


class _Routing:
    """Routes this thread's allocations on a device to a pool. torch versions differ in which of two nested pools they
    prefer, so only the innermost is in use at a time."""

    def __init__(self, stack: Stack, device: int | None) -> None:
        self._stack = stack
        self._device = torch.cuda.current_device() if device is None else device
        self._pool: Pool | None = None
        self._routed: AbstractContextManager[Any] | None = None

    def __enter__(self) -> _Routing:
        outer = self._stack.entered[-1:]
        for each in outer:
            each._leave()
        try:
            self._route()
        except BaseException:
            for each in outer:
                each._route()
            raise
        self._stack.entered.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._leave()
        self._stack.entered.pop()
        for outer in self._stack.entered[-1:]:
            outer._route()

    def _route(self) -> None:
        if self._pool is not None:
            routed = torch.cuda.use_mem_pool(self._pool.torch_pool, device=self._device)
            routed.__enter__()
            self._routed = routed  # not if entering failed

    def _leave(self) -> None:
        if self._routed is not None:
            self._routed.__exit__(None, None, None)
            self._routed = None


class CudaRegion(_Routing):
    """Routes torch's allocations of this thread on ``device`` to the pool that ``pool_for`` returns for the device."""

    def __init__(self, stack: Stack, device: int | None, pool_for: Callable[[int], Pool]) -> None:
        super().__init__(stack, device)
        self._pool_for = pool_for

    def __enter__(self) -> _Routing:
        self._pool = self._pool_for(self._device)
        if not self._stack.entered and not torch.cuda.is_current_stream_capturing():
            # While a pool is in use, torch does not give its other caches back to make room for it.
            torch.cuda.empty_cache()
        return super().__enter__()

    def _route(self) -> None:
        self._pool = self._pool or self._pool_for(self._device)
        super()._route()

    def forget_pool(self) -> None:
        """Have another pool from now on, if this region is suspended."""
        if self._routed is None:
            self._pool = None


class OutsideRegions(_Routing):
    """Suspends the region of this thread, in favour of a pool of torch's own or none."""

    def __init__(self, stack: Stack, own_pool: bool) -> None:
        super().__init__(stack, None)
        self._pool = Pool(self._device) if own_pool else None

    def __exit__(self, *exception: Any) -> None:
        self._leave()
        if self._pool is not None:
            self._pool = None
            torch.cuda.empty_cache()  # now, because torch gives caches back only while no pool is in use
        super().__exit__(*exception)
