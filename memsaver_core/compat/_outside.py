"""Leaving the region of a thread for a while: torch's own memory inside one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from memsaver_core import _cuda_region, _host_region, _process
from memsaver_core._cuda_region import CudaRegion


class _CudaOutside(CudaRegion):
    """Takes the place of a region, with a pool of torch's own or none."""

    def __init__(self, pool: torch.cuda.MemPool | None) -> None:
        self._pool = pool
        self._device = torch.cuda.current_device()
        self._routing: AbstractContextManager[Any] | None = None

    def __enter__(self) -> _CudaOutside:
        regions = _cuda_region._regions()
        if regions:
            regions[-1]._leave()
        self._route()
        regions.append(self)
        return self

    def _route(self) -> None:
        if self._pool is not None:
            super()._route()


@contextmanager
def outside(*, own_pool: bool = False) -> Iterator[None]:
    """Inside, what torch allocates in this thread is under no tag.

    Args:
        own_pool: in a pool that ends with this, so that nothing lands in a free block of memory under a tag, and what
            was freed is back with the driver afterwards.
    """
    if not _process.enabled():
        yield
    elif _process.driver_name() == "cuda":
        with _CudaOutside(torch.cuda.MemPool() if own_pool else None):
            yield
        if own_pool:
            torch.cuda.empty_cache()
    else:
        regions: list[Any] = _host_region._regions()  # a region takes only what is made while it is the last one
        regions.append(None)
        try:
            yield
        finally:
            regions.pop()
