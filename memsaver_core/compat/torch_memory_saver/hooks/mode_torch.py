"""Allocations of torch alone, by its pluggable allocator."""

from __future__ import annotations

from memsaver_core import _native
from memsaver_core.compat.torch_memory_saver.hooks.base import HookUtilBase


class HookUtilModeTorch(HookUtilBase):
    """What torch allocates in a region is caught."""

    def get_path_binary(self) -> str:
        """The library whose functions torch calls: the core's."""
        return _native.__file__
