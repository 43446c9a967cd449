"""The host device: real pages of this machine, for tests and development without a GPU."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from memsaver_core import _native
from memsaver_core.backends.base import Backend
from memsaver_core.backends.host_region import HostRegion
from memsaver_core.contract.status import DeviceMemory


class HostBackend(Backend):
    """Host memory, in arenas as on a GPU."""

    name = "host"

    def region(
        self, saver: _native.Saver, device: int | None, tag: str, restore: str, chunk_bytes: int
    ) -> AbstractContextManager[Any]:
        return HostRegion(saver, self._stack, device or 0, tag, restore, chunk_bytes)

    def ends(self, saver: _native.Saver, storages: Iterable[torch.UntypedStorage]) -> dict[int, int]:
        unit = saver.device_info(0)["granularity"]  # of an allocation, which has one storage
        return {begin: end + -end % unit for begin, end in super().ends(saver, storages).items()}

    def storage_in(self, buffer: _native.HostBuffer, device: int, offset: int, nbytes: int) -> torch.UntypedStorage:
        return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=offset).untyped_storage()

    @contextmanager
    def outside_regions(self, *, own_pool: bool = False) -> Iterator[None]:
        self._stack.entered.append(None)  # a region takes only what is made while it is the innermost
        try:
            yield
        finally:
            self._stack.entered.pop()

    def empty_cache(self) -> None:
        super().empty_cache()
        ctypes.CDLL(None).malloc_trim(0)  # the C library's cache is host memory, too

    def read_device(self, saver: _native.Saver, index: int) -> DeviceMemory:
        """Read the host device's count over all processes that share it. ``process_bytes`` is this process's resident
        memory, or None if it may open no more files: a resume must work without."""
        free, total = saver.memory_info(index)
        now = {"total_bytes": total, "used_bytes": total - free, "process_bytes": _resident_bytes()}
        return DeviceMemory(index=index, **{**saver.device_info(index), **now})


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return None
