"""Memory that libraries cache for speed, and how it is given back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from memsaver_core import graphs
from memsaver_core.storages import objects_of

_torch: Any = torch._C  # these calls have no public names

# The interpreter itself freezes a few hundred objects as it starts (Python 3.12); torch alone has a hundred thousand.
_FROZEN_AT_START = 10_000

#: A graph that was found among all objects. While it lives, there is no need to search again.
_found: weakref.ref[Any] | None = None


def free_workspaces() -> bool:
    """Give cuBLAS's workspaces back to torch's cache; returns False, and does nothing, if a CUDA graph may use them."""
    if not torch.cuda.is_initialized():
        return True
    if _may_have_graphs():
        return False
    _torch._cuda_clearCublasWorkspaces()
    return True


def free_pinned_memory() -> int:
    """Unpin the host memory that torch only caches. Returns its bytes, or 0 if this version of torch does not say."""
    if not torch.cuda.is_initialized():
        return 0
    before = _pinned_bytes()
    _torch._host_emptyCache()
    return max(0, before - _pinned_bytes())


def _may_have_graphs() -> bool:
    """Return whether a captured CUDA graph may be alive in this process. Graphs not made by ``memsaver_core.graph`` are
    searched for among all objects but those that ``gc.freeze()`` has hidden, which takes up to a tenth of a second."""
    global _found
    if graphs.grown or gc.get_freeze_count() > _FROZEN_AT_START or (_found is not None and _found() is not None):
        return True
    found = objects_of(torch.cuda.CUDAGraph)
    _found = weakref.ref(found[0]) if found else None
    return bool(found)


def _pinned_bytes() -> int:
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
