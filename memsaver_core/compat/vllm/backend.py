"""vLLM's sleep-mode backend ``memsaver``, which vLLM's factory imports when a worker first goes to sleep."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

import memsaver_core as ms
from memsaver_core import process
from memsaver_core.compat.vllm.allocator import WEIGHTS, policy_of, worker_memory
from memsaver_core.contract.errors import UnsupportedError
from memsaver_core.contract.policies import RestorePolicy
from memsaver_core.resizing import KV_CACHE

#: The only tags that a wake-up by tags may leave asleep. All others come back with any wake-up.
DEFERRABLE = frozenset({WEIGHTS, KV_CACHE})


class MemsaverBackend(SleepModeBackend):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Releases and resumes what vLLM has put under tags, in any order."""

    def suspend(self, level: int = 1) -> None:
        """Release all, except what ``memsaver_core.release`` leaves resident. Level 1 keeps the weights in host memory,
        level 2 discards them; both keep graphs and buffers. Raises UnsupportedError for another level
        (nothing was changed), MemsaverError as ``memsaver_core.release``."""
        if level not in (1, 2):
            raise UnsupportedError(
                f"sleep level {level}: vLLM's workers cannot wake from it; to hibernate, call LLM.sleep(level=3) or "
                "the service's POST /sleep?level=3, which reach the workers after vLLM's own part"
            )
        policies = {tag: _policy_at(level, tag) for tag in process.known_tags()}
        _unless_overridden(partial(ms.release, restore=policies))
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Resume ``tags``, or all if None. What is neither weights nor KV cache comes back with either."""
        self._state = "RESUMING"
        try:
            _unless_overridden(partial(_resume, tags))
        finally:
            self._state = "SUSPENDED" if any(tag.released_bytes for tag in ms.status().tags) else "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Release ``tags`` without keeping their content. Tags that do not exist are ignored."""
        if names := [tag for tag in tags if tag in process.known_tags()]:
            ms.release(names, restore={tag: _policy_at(2, tag) for tag in names})
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


def _policy_at(level: int, tag: str) -> RestorePolicy:
    return RestorePolicy.DISCARD if tag == WEIGHTS and level == 2 else policy_of(tag)


def _resume(tags: list[str] | None) -> None:
    if tags is None:
        ms.resume()
    elif names := [tag for tag in process.known_tags() if tag in tags or tag not in DEFERRABLE]:
        ms.resume(names)


def _unless_overridden(move: Callable[[], object]) -> None:
    override, worker_memory.override = worker_memory.override, None
    (override or move)()
