"""SGLang as an ``Engine``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memsaver_core.errors import ConfigurationError, MemsaverError, UnsupportedError
from memsaver_server.engine import DrainMode, DrainTimeoutError, check_drain_mode, never
from memsaver_server.integrations.scheduler_loop.checks import memory_problem
from memsaver_server.integrations.scheduler_loop.engine import ITERATION_S, LoopEngine
from memsaver_server.integrations.sglang import names, port
from memsaver_server.integrations.sglang.controls import Controls
from memsaver_server.integrations.sglang.intake import Intake
from memsaver_server.integrations.sglang.prompt import VerificationPrompt
from memsaver_server.integrations.sglang.work import SchedulerWork
from memsaver_server.settings import Settings

if TYPE_CHECKING:
    from memsaver_server.lifecycle import Lifecycle

#: How long the verification prompt may take, seconds.
VERIFICATION_S = 60.0


class SglangEngine(LoopEngine):
    """An engine over a ``Scheduler``.

    Rank 0 admits, holds or refuses requests. A refused one is aborted with status 503, which SGLang's server answers to
    its client.
    """

    name = "sglang"

    @property
    def model_name(self) -> str:
        return str(getattr(getattr(self._scheduler, "server_args", None), "model_path", ""))

    def __init__(self, scheduler: Any) -> None:
        """Take over the intake of ``scheduler``, before its event loop runs.

        Raises:
            ConfigurationError: this scheduler cannot be served; the message says why.
        """
        check(scheduler)
        self._scheduler = scheduler
        self._messages = importlib.import_module("sglang.srt.managers.io_struct")
        self._intake = Intake(scheduler, self._messages)
        work = SchedulerWork(scheduler)
        super().__init__(work, port.lead(scheduler, work), scheduler.world_group)
        self.loop.take = self._intake.admit
        self._controls: Controls | None = None
        self._prompt: VerificationPrompt | None = None
        self._frozen = False  # of the scheduler's thread alone

    def take_controls(self, lifecycle: Lifecycle, settings: Settings) -> None:
        controls = self._controls = Controls(
            self, self._scheduler, self._intake, lifecycle, settings, self._leave_paused
        )
        self.loop.take = lambda received: self._intake.admit(controls.take(received))

    # The methods of ``Engine``.

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self._intake.close(reason, hold)

    def open_admission(self) -> None:
        self._intake.open()
        self.loop.submit(self._opened)

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        """Bring every rank's scheduler to a standstill until `open_admission`.

        With ``keep`` running requests go back to SGLang's waiting queue, and are computed again from their tokens; so
        do those that SGLang has paused in place, which would not end, nor be aborted.

        Raises:
            DrainTimeoutError: it took longer, or was given up; the scheduler continues as before.
            UnsupportedError: the mode is ``keep``, and the engine is pipeline-parallel.
            ValueError: the mode is unknown.
        """
        check_drain_mode(mode)
        if mode == "keep" and names.parallel(self._scheduler).pp_size > 1:
            raise UnsupportedError(
                "SGLang cannot set requests aside with pipeline parallelism: its pause reaches one of the batches in "
                "the pipeline alone; release with the mode wait or abort"
            )
        froze = False

        def begin() -> None:
            nonlocal froze
            if mode == "keep" or self._scheduler._engine_paused:
                froze = self._freeze()
            if mode == "abort":
                self.loop.send(self._messages.AbortReq(rid="", abort_all=True))

        self.when_still(timeout_s, begin=begin, undo=lambda: self._thaw() if froze else None, given_up=given_up)
        self._run("save_buffers")

    def verify_tokens(self) -> list[int]:
        """Return the tokens that follow a fixed prompt, computed on all ranks without a cached prefix.

        Raises:
            UnsupportedError: the engine generates no tokens.
            MemsaverError: they were not computed within ``VERIFICATION_S``.
        """
        if not getattr(self._scheduler, "is_generation", True):
            raise UnsupportedError("the engine generates no tokens (an embedding model); leave 'verify' out")
        prompt = VerificationPrompt(self._scheduler, self._messages)
        try:
            self._run("set_aside")
            self._prompt = prompt
            self.loop.send(prompt.request)
            self.loop.wait_for_future(prompt.tokens, VERIFICATION_S)
            if not prompt.tokens.done():
                self.loop.send(self._messages.AbortReq(rid=prompt.request.rid))
                raise MemsaverError(f"the verification prompt was not computed in {VERIFICATION_S:g} s")
            return prompt.tokens.result()
        finally:
            self._prompt = None
            with suppress(DrainTimeoutError):  # requests that were set aside continue beside the prompt
                self.when_still(ITERATION_S)
            self._run("bring_back")

    # In the scheduler's thread.

    def _leave_paused(self) -> None:
        """A caller pauses generation: that is theirs to end."""
        self._frozen = False

    def _note(self) -> None:
        """The scheduler has processed what it received."""
        if (prompt := self._prompt) is not None:
            prompt.note()
        super()._note()

    def _opened(self) -> None:
        if self._intake.is_open:
            self._thaw()
            if self._controls is not None:
                self._controls.continue_now()

    def _freeze(self) -> bool:
        """Send running requests back to the waiting queue; return whether there were any."""
        if self._work.is_still():
            return False
        already = self._scheduler._engine_paused
        self.loop.send(self._messages.PauseGenerationReqInput(mode="retract"))
        self._frozen = self._frozen or not already  # a pause that another caller asked for is theirs to end
        return not already

    def _thaw(self) -> None:
        if self._frozen:
            self._frozen = False
            self.loop.send(self._messages.ContinueGenerationReqInput())


def start(scheduler: Any, service: bool) -> SglangEngine | None:
    """As ``plugin.served`` has it."""
    check(scheduler, service=service)
    if scheduler.world_group.rank_in_group == 0:
        return SglangEngine(scheduler)
    port.join(scheduler)
    return None


def check(scheduler: Any, *, service: bool = False) -> None:
    """Raise ConfigurationError if ``scheduler`` cannot be served; the message says why.

    Args:
        service: whether a service is to release all memory of the engine, and not only SGLang's own calls.
    """
    if lacking := names.missing(scheduler):
        raise ConfigurationError(
            f"this version of SGLang cannot be served: it has no {', '.join(lacking)}; docs/sglang.md lists versions "
            "that can"
        )
    parallel = names.parallel(scheduler)
    mode = getattr(scheduler.disaggregation_mode, "value", scheduler.disaggregation_mode)
    adapter = scheduler.memory_saver_adapter
    if problem := memory_problem(adapter.enabled, type(adapter).__module__):
        pass
    elif getattr(parallel, "attn_dp_size", 1) > 1:
        problem = (
            "with data-parallel attention each group of ranks takes requests for itself, while all compute in step; "
            "release by SGLang's own /release_memory_occupation"
        )
    elif service and parallel.dp_size > 1:
        problem = (
            f"it is one of {parallel.dp_size} data-parallel replicas, of which each takes requests for itself, and a "
            "service would see one; run a server for each replica, or leave MEMSAVER_SGLANG out and release by "
            "SGLang's own /release_memory_occupation, which memsaver carries out on each"
        )
    elif scheduler.world_group.world_size > 1 and getattr(scheduler.server_args, "nnodes", 1) > 1:
        problem = "its ranks are on several hosts; release by SGLang's own /release_memory_occupation"
    elif getattr(scheduler, "mm_receiver", None) is not None:
        problem = "it waits for embeddings of another engine's encoder (--language-only), out of the service's sight"
    elif getattr(scheduler.server_args, "weight_cache_mode", "off") != "off":
        problem = "its weights are in the memory of SGLang's weight cache; start it with --weight-cache-mode off"
    elif mode != "null":
        problem = f"it is the {mode} side of a disaggregated engine"
    elif getattr(scheduler, "rust_server", None) is not None:
        problem = "requests reach it by SGLang's Rust server; unset SGLANG_RUST_SERVER"
    if problem:
        raise ConfigurationError(f"SGLang's scheduler cannot be served: {problem}")
