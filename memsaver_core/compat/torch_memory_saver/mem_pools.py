"""``torch_memory_saver._impl._mem_pools``, as projects use it."""

from __future__ import annotations

from typing import Any

from memsaver_core import _native, process

_MISSING = object()


class MemPools:
    """The pools of regions, of which torch keeps what is freed in them until they go.

    Let go of one, and ``torch.cuda.empty_cache()`` gives back what is free in it; tensors in it live on, under their
    tag. On the host driver there are none.
    """

    def pop(self, key: tuple[Any, ...], default: Any = _MISSING) -> Any:
        """Let go of the pools of ``(tag, enable_cpu_backup[, enable_disk_backup, ...])``.

        Returns:
            None, or ``default`` where there are none.

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
        """Let go of all."""
        process.backend().forget_pools()
