"""``torch_memory_saver._impl._mem_pools``, as projects use it."""

from __future__ import annotations

from typing import Any

from memsaver_core import _native, process

_MISSING = object()


class MemPools:
    """The pools of regions. torch keeps what is freed in a pool until the pool is dropped.

    After a drop, ``torch.cuda.empty_cache()`` gives back its free memory; its tensors live on, under their tag. The
    host driver has no pools.
    """

    def pop(self, key: tuple[Any, ...], default: Any = _MISSING) -> Any:
        """Drop the pools of ``(tag, enable_cpu_backup[, enable_disk_backup, ...])``.

        Returns:
            None, or ``default`` if there are none.

        Raises:
            KeyError: there are none, and no default was given.
        """
        disk_backup = len(key) > 2 and key[2] is True
        restore = _native.restore_for(key[0], bool(key[1]), disk_backup)
        if process.backend().forget_pools(key[0], restore):
            return None
        if default is _MISSING:
            raise KeyError(key)
        return default

    def clear(self) -> None:
        """Drop all."""
        process.backend().forget_pools()
