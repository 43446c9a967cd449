"""vLLM as an ``Engine``.

The memory is in vLLM's workers, where the plugin ``memsaver_core.compat.vllm`` manages it. Requests are drained, frozen
and continued by vLLM's own pause and sleep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from memsaver_core.errors import MemsaverError, UnsupportedError
from memsaver_core.options import ReleaseOptions
from memsaver_core.policies import RestorePolicy
from memsaver_core.ranks.protocol import Answer, ExpectRelease, Plain, SleepNow, TakeOutcome
from memsaver_server.engine import DrainMode, DrainTimeoutError, Engine, never
from memsaver_server.gate import Gate
from memsaver_server.integrations.vllm.api_server import AsyncClient, HttpAdmission
from memsaver_server.integrations.vllm.offline import OfflineClient
from memsaver_server.ranks import Deadlines, GroupFailedError, RankMemory

#: vLLM's tag for a wake-up that only continues generation.
SCHEDULING = "scheduling"

#: The prompt of a verification: token ids that every vocabulary has.
VERIFICATION_PROMPT = tuple(range(3, 35))
VERIFICATION_TOKENS = 8
#: How long it may take, and the scheduler's start before it, seconds.
VERIFICATION_S = 60.0
#: How long the scheduler may take to stop after it, seconds.
STOP_S = 10.0

_T = TypeVar("_T")


class VllmMemory(RankMemory):
    """Releases inside vLLM's own sleep."""

    def __init__(
        self, ranks: VllmEngine, processes: Mapping[str, int] | None = None, deadlines: Deadlines | None = None
    ) -> None:
        super().__init__(ranks, processes, deadlines)
        self._ranks = ranks

    def release_awake(self, options: ReleaseOptions) -> list[Answer]:
        answers = self.ask(ExpectRelease(options))
        if any(answer.failure is not None for answer in answers):
            return answers
        discards_weights = options.restore.get("weights") == RestorePolicy.DISCARD
        level = 2 if discards_weights and (not options.tags or "weights" in options.tags) else 1
        self._group.progress.asking()  # each rank that is put to sleep is at work, as with a message
        try:
            self.wait(self._ranks.sleep(level))
        except GroupFailedError:
            raise
        except Exception as error:
            self.ask(TakeOutcome())  # so that no rank still expects the release
            raise MemsaverError(f"the engine cannot go to sleep: {error}; repeat the call, or resume") from error
        answers = self.ask(TakeOutcome())
        if all(answer.report is None and answer.failure is None for answer in answers):
            # The engine believes it is asleep, as part of its memory was released before, and did not ask its ranks.
            answers = self.ask(SleepNow(options, level))
        return answers


class VllmEngine(Engine):
    """An engine over either front end of vLLM."""

    name = "vllm"

    def __init__(self, client: AsyncClient | OfflineClient, admission: HttpAdmission | Gate) -> None:
        self._client = client
        self._admission = admission
        self._asleep = False
        self._paused = False
        self.memory = VllmMemory(self, client.processes)

    # The ranks, for ``memory``.

    def start(self, message: Plain) -> Future[list[Plain]]:
        return self._client.start(message)

    def sleep(self, level: int) -> Future[None]:
        """Put the engine to sleep in its own way: 1 keeps the weights, 2 discards them. Does not block."""
        self._asleep = True
        return self._client.sleep(level)

    @property
    def model_name(self) -> str:
        return self._client.model_name()

    # The methods of ``Engine``.

    def is_alive(self) -> bool:
        return self._client.is_alive()

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self._admission.close_admission(reason, hold=hold)

    def open_admission(self) -> None:
        if self._paused or self._asleep:
            self._client.wake_up(None if self._asleep else [SCHEDULING])
        self._paused = self._asleep = False
        self._admission.open_admission()

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        self._admission.drain(timeout_s, mode, given_up)
        try:
            self._client.pause(mode, timeout_s, given_up)
        except DrainTimeoutError:
            if not self._paused:
                self._client.wake_up([SCHEDULING])
            raise
        self._paused = True

    def verify_tokens(self) -> list[int]:
        """Have vLLM generate from a fixed prompt, for which its scheduler has to run.

        Raises:
            UnsupportedError: requests are frozen, which would run along.
            MemsaverError: the tokens were not computed in time.
        """
        if frozen := self._client.pending():
            raise UnsupportedError(
                f"{len(frozen)} request(s) are frozen and would run along; to verify, release with mode wait or abort"
            )
        _in_time(self._client.run_scheduler(None if self._asleep else [SCHEDULING]))
        self._asleep, self._paused = False, True
        try:
            return _in_time(self._client.generate(VERIFICATION_PROMPT, VERIFICATION_TOKENS))
        finally:
            self._client.pause("abort", STOP_S, never)  # a prompt that was not computed in time, too

    def flush_cache(self) -> None:
        self._client.reset_prefix_cache()

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """Reset the prefix cache again: vLLM did so when it slept, but a part may have been released since."""
        if "kv_cache" in lost:
            self._client.forget_prefixes()


def _in_time(call: Future[_T]) -> _T:
    if not wait([call], VERIFICATION_S).done:
        raise MemsaverError(f"vLLM did not compute the verification prompt in {VERIFICATION_S:g} s")
    return call.result()
