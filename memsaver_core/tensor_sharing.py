"""Refuse to share tensors of regions with other processes.

CUDA has no IPC handle for memory that can be released; torch itself only says "invalid argument". On the host driver
torch would silently move the tensor to shared memory, out of its region and to another address. torch has no hook for
this, but all ways to share reach three methods of ``torch.UntypedStorage``: these are wrapped once a saver exists.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from memsaver_core import _native
from memsaver_core.contract.errors import UnsupportedError


def refuse_to_share(saver: _native.Saver) -> None:
    """From now on, sharing memory of ``saver`` with another process raises UnsupportedError."""
    for name in ("_share_cuda_", "_share_fd_cpu_", "_share_filename_cpu_"):
        setattr(torch.UntypedStorage, name, _guarded(saver, getattr(torch.UntypedStorage, name)))


def _guarded(saver: _native.Saver, share: Callable[..., Any]) -> Callable[..., Any]:
    pid = os.getpid()

    @functools.wraps(share)
    def guarded(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        # A forked child has no saver; what it shares is copied.
        if os.getpid() == pid and saver.owns(storage.data_ptr()):
            tag = saver.backup_of(storage.data_ptr(), 1, 0)["tag"]
            raise UnsupportedError(
                f"a tensor of region {tag!r} ({storage.nbytes()} bytes at {storage.data_ptr():#x}) cannot be shared "
                "with another process, because its memory can be released; share a clone() that is made outside of "
                "any region"
            )
        return share(storage, *args, **kwargs)

    return guarded
