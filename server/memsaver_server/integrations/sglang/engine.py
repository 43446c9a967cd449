"""SGLang as an ``Engine``.

The names of SGLang used in this folder are those of the commit that docs/sglang.md gives.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import memsaver_core as ms
from memsaver_core.errors import ConfigurationError, UnsupportedError
from memsaver_server.engine import LOCAL_MEMORY, DrainMode, DrainTimeoutError, Engine, Memory, check_drain_mode, never
from memsaver_server.integrations.sglang import ranks
from memsaver_server.integrations.sglang.event_loop import LeadingLoop
from memsaver_server.integrations.sglang.intake import Intake
from memsaver_server.integrations.sglang.work import SchedulerWork

#: The longest iteration of an idle event loop, with --sleep-on-idle, and some more, seconds.
ITERATION_S = 2.0


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
        # Of the scheduler's thread alone.
        self._drains: list[Future[None]] = []
        self._frozen = False
        #: Called in the scheduler's thread after it has carried out a weight update; the plugin sets it.
        self.on_weights_updated: Callable[[], None] = lambda: None

    # The methods of ``Engine``.

    def is_alive(self) -> bool:
        return self._loop.is_alive()

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self._intake.close(reason, hold)

    def open_admission(self) -> None:
        self._intake.open()
        self._loop.submit(lambda: self._thaw() if self._intake.is_open else None)

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        """Bring every rank's scheduler to a standstill until `open_admission`.

        With ``keep`` running requests go back to SGLang's waiting queue, and are computed again from their tokens.

        Raises:
            DrainTimeoutError: it took longer, or was given up; the scheduler continues as before.
            UnsupportedError: the mode is ``keep``, and the engine is pipeline-parallel.
            ValueError: the mode is unknown.
        """
        check_drain_mode(mode)
        if mode == "keep" and self._scheduler.ps.pp_size > 1:
            raise UnsupportedError(
                "SGLang cannot set requests aside with pipeline parallelism: its pause reaches one of the batches in "
                "the pipeline alone; release with the mode wait or abort"
            )
        begun_at = time.monotonic()
        still: Future[None] = Future()
        froze = False

        def begin() -> None:
            nonlocal froze
            if mode == "abort":
                self._loop.send(self._messages.AbortReq(rid="", abort_all=True))
            elif mode == "keep":
                froze = self._freeze()
            self._drains.append(still)

        def give_up() -> None:
            if still in self._drains:
                self._drains.remove(still)
                if froze:
                    self._thaw()

        begun = self._loop.submit(begin)
        # Without any time left, too, one iteration is tried.
        self._loop.wait_for_future(begun, max(timeout_s, ITERATION_S), given_up)
        if begun.cancel():
            raise DrainTimeoutError(timeout_s, self._work.in_flight())
        begun.result()
        self._loop.wait_for_future(still, begun_at + timeout_s - time.monotonic(), given_up)
        if not still.done():
            # If this one began just now, the iteration that it began in may still end it.
            self._loop.wait_for_future(self._loop.submit(give_up), ITERATION_S)
            if not still.done():
                raise DrainTimeoutError(timeout_s, self._work.in_flight())
        self._run("save_buffers")

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

    def _note(self, received: Sequence[Any]) -> None:
        """The scheduler has processed ``received``."""
        if any(_is_weight_update(each) for each in received):
            self.on_weights_updated()
        if self._drains and self._work.is_still():
            drains, self._drains = self._drains, []
            for each in drains:
                each.set_result(None)

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


def _is_weight_update(request: Any) -> bool:
    """Whether ``request`` is one by which SGLang's server writes weights: from disk, tensors, a group or by IPC.

    An update in several requests counts with its first, as nothing marks the last: its clients resume the KV cache, or
    continue generation, after all of them. Whether one succeeded is told to its client alone, which has to stop then.
    """
    name = type(request).__name__
    return name.startswith("UpdateWeight") and "From" in name


def check(scheduler: Any) -> None:
    """Raise ConfigurationError if ``scheduler`` cannot be served; the message says why."""
    parallel = scheduler.ps
    mode = getattr(scheduler.disaggregation_mode, "value", scheduler.disaggregation_mode)
    problem = ""
    if ms.enabled() and not scheduler.memory_saver_adapter.enabled:
        problem = "its memory is in no region; start it with --enable-memory-saver"
    elif ms.enabled() and not _is_ours(scheduler.memory_saver_adapter):
        problem = (
            "it uses another torch_memory_saver; install memsaver-torch-memory-saver in place of that, or call "
            "memsaver_core.compat.install() before SGLang is imported"
        )
    elif parallel.dp_size > 1:
        problem = (
            f"it is one of {parallel.dp_size} data-parallel replicas, of which each takes requests for itself, and a "
            "service would see one; run a server for each replica, or release by SGLang's own "
            "/release_memory_occupation"
        )
    elif ranks.are_several(scheduler) and getattr(scheduler.server_args, "nnodes", 1) > 1:
        problem = "its ranks are on several hosts; release by SGLang's own /release_memory_occupation"
    elif getattr(scheduler, "mm_receiver", None) is not None:
        problem = "it waits for embeddings of another engine's encoder (--language-only), out of the service's sight"
    elif mode != "null":
        problem = f"it is the {mode} side of a disaggregated engine"
    elif scheduler.rust_server is not None:
        problem = "requests reach it by SGLang's Rust server; unset SGLANG_RUST_SERVER"
    if problem:
        raise ConfigurationError(f"SGLang's scheduler cannot be served: {problem}")


def _is_ours(adapter: Any) -> bool:
    """Whether SGLang's adapter imported memsaver's module under the name ``torch_memory_saver``."""
    module = importlib.import_module(type(adapter).__module__)
    return getattr(getattr(module, "torch_memory_saver", None), "__name__", "").startswith("memsaver_core.")
