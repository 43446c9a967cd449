"""vLLM's sleep-mode backend ``memsaver``, which vLLM's factory imports when a worker first goes to sleep."""

from __future__ import annotations

import os

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

import memsaver_core as ms
from memsaver_core import process
from memsaver_core.compat.vllm.allocator import WEIGHTS, vllm_allocator
from memsaver_core.contract.errors import UnsupportedError


class MemsaverBackend(SleepModeBackend):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Sleeps and wakes up by memsaver's allocator, which vLLM uses with any backend."""

    def suspend(self, level: int = 1) -> None:
        """Release all. Level 1 keeps the weights in host memory, level 2 discards them; both keep graphs and buffers.
        Raises UnsupportedError for another level (nothing was changed), MemsaverError as ``memsaver_core.release``."""
        if level not in (1, 2):
            raise UnsupportedError(
                f"sleep level {level}: vLLM's workers cannot wake from it; to hibernate, call LLM.sleep(level=3) or "
                "the service's POST /sleep?level=3, which reach the workers after vLLM's own part"
            )
        vllm_allocator().sleep((WEIGHTS,) if level == 1 else ())
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Resume ``tags``, or all if None. What is neither weights nor KV cache comes back with either."""
        self._state = "RESUMING"
        try:
            vllm_allocator().wake_up(tags)
        finally:
            self._state = "SUSPENDED" if any(tag.released_bytes for tag in ms.status().tags) else "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Release ``tags`` without keeping their content."""
        vllm_allocator().discard(tags)
        self._state = "SUSPENDED"

    @classmethod
    def is_supported(cls) -> bool:
        return process.backend().has_memory_pools

    @classmethod
    def preserves_communicators(cls) -> bool:
        """NCCL's memory stays resident."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Addresses do not change and modules stay loaded."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Return whether NCCL registers no buffers of captured graphs, our default; else their replay would hang."""
        return os.environ.get("NCCL_GRAPH_REGISTER", "0") == "0"
