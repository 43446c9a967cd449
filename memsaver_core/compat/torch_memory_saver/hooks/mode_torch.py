"""Catch the allocations of torch alone, by its pluggable allocator."""

from __future__ import annotations

from memsaver_core import _native
from memsaver_core.compat.torch_memory_saver.hooks.base import HookUtilBase


class HookUtilModeTorch(HookUtilBase, mode="torch"):
    """Catches what torch allocates in a region."""

    def get_path_binary(self) -> str:
        """Return the path of the native core, whose functions torch calls."""
        return _native.__file__
