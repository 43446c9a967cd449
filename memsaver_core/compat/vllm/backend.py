"""The sleep-mode backend ``memsaver``. Imported by vLLM's factory when a worker goes to sleep for the first time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.device_allocator import get_mem_allocator_instance
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

import memsaver_core as ms
from memsaver_core import process
from memsaver_core.compat.vllm.tags import WEIGHTS
from memsaver_core.errors import UnsupportedError

if TYPE_CHECKING:
    from memsaver_core.compat.vllm.allocator import MemsaverAllocator


class MemsaverBackend(SleepModeBackend):  # type: ignore[misc]  # its types are not seen here
    """Sleep and wake-up by memsaver's allocator, which holds the memory whatever the backend."""

    def suspend(self, level: int = 1) -> None:
        """Level 1 keeps the weights in host memory, level 2 gives them up. CUDA graphs and buffers are kept by both.

        Raises:
            UnsupportedError: another level; nothing was changed.
            MemsaverError: as ``memsaver_core.release``.
        """
        if level not in (1, 2):
            raise UnsupportedError(
                f"sleep level {level} is not one that vLLM's workers can return from; hibernate by the service's "
                "POST /sleep?level=3, which reaches them after vLLM's own work"
            )
        _allocator().sleep((WEIGHTS,) if level == 1 else ())
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Bring ``tags`` back, everything where it is None; what is not weights or KV cache comes with any of them."""
        self._state = "RESUMING"
        try:
            _allocator().wake_up(tags)
        finally:
            self._state = "SUSPENDED" if any(tag.released_bytes for tag in ms.status().tags) else "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Release ``tags`` without their content."""
        _allocator().discard(tags)
        self._state = "SUSPENDED"

    @classmethod
    def is_supported(cls) -> bool:
        return process.backend().has_memory_pools

    @classmethod
    def preserves_communicators(cls) -> bool:
        """NCCL's memory is not ours, and stays."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Addresses do not change, and modules stay loaded."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Only where NCCL has not registered the buffers of captured graphs: their replay hangs after a remap."""
        return os.environ.get("NCCL_GRAPH_REGISTER") == "0"

    @classmethod
    def supports_durable_storage(cls) -> bool:
        return False


def _allocator() -> MemsaverAllocator:
    allocator: MemsaverAllocator = get_mem_allocator_instance()
    return allocator
