"""vLLM behind the engine port.

The memory is in vLLM's workers, where the plugin ``memsaver_core.compat.vllm`` manages it. Requests are drained, frozen
and continued by vLLM's own pause and sleep.
"""

from __future__ import annotations

from collections.abc import Sequence

from memsaver_core.ranks.protocol import Plain
from memsaver_server.engine import DrainMode, DrainTimeoutError, Engine
from memsaver_server.gate import Gate
from memsaver_server.integrations.vllm.api_server import AsyncClient, HttpAdmission
from memsaver_server.integrations.vllm.memory import VllmMemory
from memsaver_server.integrations.vllm.offline import OfflineClient

#: vLLM's tag for a wake-up that only continues generation.
SCHEDULING = "scheduling"


class VllmEngine(Engine):
    """An engine over either front end of vLLM."""

    name = "vllm"

    def __init__(self, client: AsyncClient | OfflineClient, admission: HttpAdmission | Gate) -> None:
        self._client = client
        self._admission = admission
        self._asleep = False
        self._paused = False
        self.memory = VllmMemory(self)

    # The ranks, for ``memory``.

    def call(self, message: Plain) -> list[Plain]:
        return self._client.call(message)

    def sleep(self, level: int) -> None:
        self._asleep = True
        self._client.sleep(level)

    # The engine port.

    def is_alive(self) -> bool:
        return self._client.is_alive()

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self._admission.close_admission(reason, hold=hold)

    def open_admission(self) -> None:
        if self._paused or self._asleep:
            self._client.wake_up(None if self._asleep else [SCHEDULING])
        self._paused = self._asleep = False
        self._admission.open_admission()

    def drain(self, timeout_s: float, mode: DrainMode = "wait") -> None:
        self._admission.drain(timeout_s, mode)
        try:
            self._client.pause(mode, timeout_s)
        except DrainTimeoutError:
            if not self._paused:
                self._client.wake_up([SCHEDULING])
            raise
        self._paused = True

    def flush_cache(self) -> None:
        self._client.reset_prefix_cache()

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """Reset the prefix cache again: vLLM did so when it slept, but a part may have been released since."""
        if "kv_cache" in lost:
            self._client.reset_prefix_cache()
