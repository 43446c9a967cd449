"""Leaving the region of a thread for a while: torch's own memory inside one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from memsaver_core import process
from memsaver_core.backends import cuda_region, host_region
from memsaver_core.backends.cuda_region import CudaRegion, Pool


class _CudaOutside(CudaRegion):
    """Takes the place of a region, with a pool of torch's own or none."""

    def __init__(self, own_pool: bool) -> None:
        self._device = torch.cuda.current_device()
        self._pool = Pool(self._device) if own_pool else None
        self._routing: AbstractContextManager[Any] | None = None

    def __enter__(self) -> _CudaOutside:
        regions = cuda_region._regions()
        if regions:
            regions[-1]._leave()
        try:
            self._route()
        except BaseException:
            if regions:
                regions[-1]._route()
            raise
        regions.append(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._leave()
        if self._pool is not None:
            self._pool = None
            torch.cuda.empty_cache()  # now, because torch's caches go back only while no pool is in use
        super().__exit__(*exception)

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
    if not process.enabled():
        yield
    elif process.driver_name() == "cuda":
        with _CudaOutside(own_pool):
            yield
    else:
        regions: list[Any] = host_region._regions()  # a region takes only what is made while it is the last one
        regions.append(None)
        try:
            yield
        finally:
            regions.pop()
