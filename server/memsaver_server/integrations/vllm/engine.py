"""vLLM behind the engine port.

The memory is in vLLM's workers, where the plugin ``memsaver_core.compat.vllm`` manages it. Requests are drained, frozen
and continued by vLLM's own pause and sleep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from memsaver_core.ranks.protocol import Plain
from memsaver_server.engine import DrainMode, DrainTimeoutError
from memsaver_server.integrations.vllm.memory import SleepingRanks, VllmMemory

if TYPE_CHECKING:
    from memsaver_server.engine import Engine

#: vLLM's tag for a wake-up that only continues generation.
SCHEDULING = ["scheduling"]


class Client(SleepingRanks, Protocol):
    """What both front ends of vLLM can do, called from threads that may block."""

    def pause(self, mode: DrainMode, timeout_s: float) -> None: ...

    def proceed(self, *, asleep: bool) -> None:
        """Continue generation; ``asleep`` if vLLM believes it is. Does not block."""

    def reset_prefix_cache(self) -> None: ...

    def is_alive(self) -> bool: ...


class Admission(Protocol):
    """The engine port's members that concern admission."""

    def close_admission(self, reason: str, *, hold: int = 0) -> None: ...

    def open_admission(self) -> None: ...

    def drain(self, timeout_s: float, mode: DrainMode = "wait") -> None: ...


class VllmEngine:
    """Implements ``Engine`` over vLLM."""

    name = "vllm"

    def __init__(self, client: Client, admission: Admission) -> None:
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
            self._client.proceed(asleep=self._asleep)
        self._paused = self._asleep = False
        self._admission.open_admission()

    def drain(self, timeout_s: float, mode: DrainMode = "wait") -> None:
        self._admission.drain(timeout_s, mode)
        try:
            self._client.pause(mode, timeout_s)
        except DrainTimeoutError:
            if not self._paused:
                self._client.proceed(asleep=False)
            raise
        self._paused = True

    def flush_cache(self) -> None:
        self._client.reset_prefix_cache()

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """Reset the prefix cache again: vLLM did so when it slept, but a part may have been released since."""
        if "kv_cache" in lost:
            self._client.reset_prefix_cache()


if TYPE_CHECKING:

    def _is_an_engine(client: Client, admission: Admission) -> Engine:
        return VllmEngine(client, admission)
