"""SGLang as an ``Engine``."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import memsaver_core as ms
from memsaver_core.errors import ConfigurationError, MemsaverError, UnsupportedError
from memsaver_server.engine import LOCAL_MEMORY, DrainMode, DrainTimeoutError, Engine, Memory, check_drain_mode, never
from memsaver_server.integrations.sglang import names, ranks
from memsaver_server.integrations.sglang.controls import Controls
from memsaver_server.integrations.sglang.event_loop import LeadingLoop
from memsaver_server.integrations.sglang.intake import Intake
from memsaver_server.integrations.sglang.prompt import VerificationPrompt
from memsaver_server.integrations.sglang.work import SchedulerWork
from memsaver_server.settings import Settings

if TYPE_CHECKING:
    from memsaver_server.lifecycle import Lifecycle

#: The longest iteration of an idle event loop, with --sleep-on-idle, and some more, seconds.
ITERATION_S = 2.0

#: How long the verification prompt may take, seconds.
VERIFICATION_S = 60.0


def _nothing() -> None:
    pass


@dataclass(eq=False)
class _Waiter:
    done: Future[None]
    then: Callable[[], None]


class SglangEngine(Engine):
    """An engine over the ``Scheduler`` that receives the engine's requests, in each of whose other ranks ``ranks.join``
    is called.

    A scheduler is touched in its own thread alone, once per iteration of its event loop. There rank 0 admits, holds or
    refuses requests, and there the service's work is done on every rank, between two batches. A refused request is
    aborted with status 503, which SGLang's server answers to its client.
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
        self._work = SchedulerWork(scheduler)
        self._loop = LeadingLoop(scheduler, self._work, self._intake)
        self._loop.after = self._note
        self._several = ranks.gather(scheduler, self._loop) if ranks.are_several(scheduler) else None
        self.memory: Memory = self._several or LOCAL_MEMORY
        self._controls: Controls | None = None
        self._prompt: VerificationPrompt | None = None
        # Of the scheduler's thread alone.
        self._waiting: list[_Waiter] = []
        self._frozen = False

    def take_controls(self, lifecycle: Lifecycle, settings: Settings) -> None:
        """Have ``lifecycle`` carry out what SGLang's own server and ``Engine`` are asked for."""
        self._controls = Controls(self._scheduler, self._messages, self._loop, self, lifecycle, settings)
        self._loop.take = self._controls.take

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted."""
        return self._intake.is_open

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests. In the scheduler's thread."""
        return bool(self._scheduler.is_fully_idle())

    # The methods of ``Engine``.

    def is_alive(self) -> bool:
        return self._loop.is_alive()

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self._intake.close(reason, hold)

    def open_admission(self) -> None:
        self._intake.open()
        self._loop.submit(self._opened)

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        """Bring every rank's scheduler to a standstill until `open_admission`.

        With ``keep`` running requests go back to SGLang's waiting queue, and are computed again from their tokens; so
        do those that SGLang has paused in place, which would not end.

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
            if mode == "abort":
                self._loop.send(self._messages.AbortReq(rid="", abort_all=True))
            elif mode == "keep" or self._scheduler._engine_paused:
                froze = self._freeze()

        self.when_still(timeout_s, begin=begin, undo=lambda: self._thaw() if froze else None, given_up=given_up)
        self._run("save_buffers")

    def when_still(
        self,
        timeout_s: float,
        then: Callable[[], None] = _nothing,
        *,
        begin: Callable[[], None] = _nothing,
        undo: Callable[[], None] = _nothing,
        given_up: Callable[[], bool] = never,
    ) -> None:
        """Have ``then`` called once no request is in flight, before another one enters; return after it.

        ``begin`` is called at once, and ``undo`` if it took too long; all three in the scheduler's thread.

        Raises:
            DrainTimeoutError: it took longer than ``timeout_s``, or was given up. ``then`` was not called.
        """
        begun_at = time.monotonic()
        still = _Waiter(Future(), then)

        def start() -> None:
            begin()
            self._waiting.append(still)

        def give_up() -> None:
            if still in self._waiting:
                self._waiting.remove(still)
                undo()

        begun = self._loop.submit(start)
        # Without any time left, too, one iteration is tried.
        self._loop.wait_for_future(begun, max(timeout_s, ITERATION_S), given_up)
        if begun.cancel():
            raise DrainTimeoutError(timeout_s, self._work.in_flight())
        begun.result()
        self._loop.wait_for_future(still.done, begun_at + timeout_s - time.monotonic(), given_up)
        if not still.done.done():
            # If this one began just now, the iteration that it began in may still end it.
            self._loop.wait_for_future(self._loop.submit(give_up), ITERATION_S)
            if not still.done.done():
                raise DrainTimeoutError(timeout_s, self._work.in_flight())

    def verify_tokens(self) -> list[int]:
        """Return the tokens that follow a fixed prompt, computed on all ranks without a cached prefix.

        Raises:
            UnsupportedError: the engine generates no tokens.
            MemsaverError: they were not computed within ``VERIFICATION_S``.
        """
        if not getattr(self._scheduler, "is_generation", True):
            raise UnsupportedError("the engine generates no tokens (an embedding model); leave 'verify' out")
        self._run("set_aside")
        prompt = self._prompt = VerificationPrompt(self._scheduler, self._messages)
        try:
            self._loop.send(prompt.request)
            self._loop.wait_for_future(prompt.tokens, VERIFICATION_S)
            if not prompt.tokens.done():
                self._loop.send(self._messages.AbortReq(rid=prompt.request.rid))
                raise MemsaverError(f"the verification prompt was not computed in {VERIFICATION_S:g} s")
            return prompt.tokens.result()
        finally:
            self._prompt = None
            self.when_still(ITERATION_S)
            self._run("bring_back")

    def flush_cache(self) -> None:
        """Forget every cached prefix. Touches no memory that is released.

        Raises:
            DrainTimeoutError: requests are running, under which SGLang does not flush.
        """
        self._run("flush")

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """Write buffers back into weights that came back without content, and forget the prefixes of a lost cache.

        The weights themselves are then written by SGLang's own update calls.
        """
        self._run("repair", tuple(lost))

    def _run(self, name: str, *arguments: Any) -> None:
        """Have every rank carry out a command; raise what failed on any of them."""
        (self._several or self._loop).run(name, *arguments)

    # In the scheduler's thread.

    def _note(self) -> None:
        """The scheduler has processed what it received."""
        if (prompt := self._prompt) is not None:
            prompt.note()
        if self._waiting and self._work.is_still():
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each.then()
                each.done.set_result(None)

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
        self._loop.send(self._messages.PauseGenerationReqInput(mode="retract"))
        self._frozen = self._frozen or not already  # a pause that another caller asked for is theirs to end
        return not already

    def _thaw(self) -> None:
        if self._frozen:
            self._frozen = False
            self._loop.send(self._messages.ContinueGenerationReqInput())


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
    problem = ""
    if ms.enabled() and not scheduler.memory_saver_adapter.enabled:
        problem = "its memory is in no region; start it with --enable-memory-saver"
    elif ms.enabled() and not _is_ours(scheduler.memory_saver_adapter):
        problem = (
            "it uses another torch_memory_saver; install memsaver-torch-memory-saver in place of that, or call "
            "memsaver_core.compat.install() before SGLang is imported"
        )
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
    elif ranks.are_several(scheduler) and getattr(scheduler.server_args, "nnodes", 1) > 1:
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


def _is_ours(adapter: Any) -> bool:
    """Whether SGLang's adapter imported memsaver's module under the name ``torch_memory_saver``."""
    module = importlib.import_module(type(adapter).__module__)
    return getattr(getattr(module, "torch_memory_saver", None), "__name__", "").startswith("memsaver_core.")
