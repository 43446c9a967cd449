"""The memory of vLLM's workers, which sleep and wake in vLLM's own way around a release and a resume."""

from __future__ import annotations

from typing import Protocol

from memsaver_core.errors import MemsaverError
from memsaver_core.options import ReleaseOptions
from memsaver_core.policies import RestorePolicy
from memsaver_core.ranks.protocol import Answer, ExpectRelease, SleepNow, TakeOutcome
from memsaver_server.ranks import Channel, RankMemory


class SleepingRanks(Channel, Protocol):
    """vLLM's ranks, and its own sleep mode."""

    def sleep(self, level: int) -> None:
        """Put the engine to sleep in its own way: 1 keeps the weights, 2 discards them."""


class VllmMemory(RankMemory):
    """Releases inside vLLM's own sleep."""

    def __init__(self, ranks: SleepingRanks) -> None:
        super().__init__(ranks)
        self._ranks = ranks

    def release_awake(self, options: ReleaseOptions) -> list[Answer]:
        self._check(self.ask(ExpectRelease(options)))
        discards_weights = options.restore.get("weights") == RestorePolicy.DISCARD
        level = 2 if discards_weights and (not options.tags or "weights" in options.tags) else 1
        try:
            self._ranks.sleep(level)
        except Exception as error:
            self.ask(TakeOutcome())  # so that no rank still expects the release
            raise MemsaverError(f"the engine cannot go to sleep: {error}; repeat the call, or resume") from error
        answers = self.ask(TakeOutcome())
        if all(answer.report is None and answer.failure is None for answer in answers):
            # The engine believes it is asleep, as part of its memory was released before, and did not ask its ranks.
            answers = self.ask(SleepNow(options, level))
        return answers
