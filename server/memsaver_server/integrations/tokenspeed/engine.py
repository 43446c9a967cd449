"""tokenspeed as an ``Engine``."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import memsaver_core as ms
from memsaver_core.errors import ConfigurationError, UnsupportedError
from memsaver_server.engine import LOCAL_MEMORY, DrainMode, DrainTimeoutError, Engine, Memory, check_drain_mode, never
from memsaver_server.integrations.sglang import ranks
from memsaver_server.integrations.sglang.event_loop import LeadingLoop
from memsaver_server.integrations.tokenspeed.controls import Controls
from memsaver_server.integrations.tokenspeed.port import Everything, Port, Step
from memsaver_server.integrations.tokenspeed.work import LoopWork
from memsaver_server.settings import Settings

if TYPE_CHECKING:
    from memsaver_server.lifecycle import Lifecycle

#: The longest iteration of an idle event loop and some more, seconds.
ITERATION_S = 2.0

#: What an event loop must have, by the path to it.
NAMES = (
    "_memory._kv_cache_release_allowed", "_memory._kv_repair", "_memory._reset_caches", "_pause._abort_all_pending",
    "_pause.buffered_specs", "_pause.is_drain_pending", "_pause.released", "_pause.state", "attn_tp_cpu_group",
    "output_processor.rid_to_state", "request_handler.grammar_manager", "request_handler.process_requests",
    "request_handler.recv_func", "request_handler.recv_reqs", "request_handler.send_func", "scheduler",
    "server_args.mapping.attn",
)  # fmt: skip


class TokenspeedEngine(Engine):
    """An engine over the ``EventLoop`` of rank 0; each other rank calls ``ranks.join`` with its ``Port``.

    An event loop is touched in its own thread alone, once per iteration. By tokenspeed alone requests wait while memory
    is released, and each holds a lock that a weight update waits for; so they are refused, or wait up to a number.
    """

    name = "tokenspeed"

    @property
    def model_name(self) -> str:
        return str(self._loop.server_args.model)

    def __init__(self, loop: Any) -> None:
        """Take over the intake of ``loop``, before it runs.

        Raises:
            ConfigurationError: this loop cannot be served; the message says why.
        """
        check(loop)
        self._loop = loop
        self._work = LoopWork(loop)
        self._port = Port(loop, self._work)
        self._leading = LeadingLoop(self._port, self._work, Everything())  # type: ignore[arg-type]
        self._leading.after = self._note
        self._several = ranks.gather(self._port, self._leading) if ranks.are_several(self._port) else None
        self.memory: Memory = self._several or LOCAL_MEMORY
        self._still: Future[None] | None = None

    def take_controls(self, lifecycle: Lifecycle, settings: Settings) -> None:
        """Have ``lifecycle`` carry out what tokenspeed's own server and ``Engine`` are asked for."""
        self._leading.take = Controls(self._port, self._leading, lifecycle, settings).take

    # The methods of ``Engine``.

    def is_alive(self) -> bool:
        return self._leading.is_alive()

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self._leading.send(Step("close", (reason, hold)))

    def open_admission(self) -> None:
        self._leading.send(Step("open"))

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        """Bring every rank's event loop to a standstill until `open_admission`.

        Raises:
            DrainTimeoutError: it took longer, or was given up; the requests continue.
            UnsupportedError: the mode is ``keep``.
            ValueError: the mode is unknown.
        """
        check_drain_mode(mode)
        if mode == "keep":
            raise UnsupportedError(
                "tokenspeed cannot compute a paused request again from its tokens; release with the mode wait or abort"
            )
        deadline = time.monotonic() + timeout_s
        still: Future[None] = Future()

        def begin() -> None:
            self._leading.send(Step("drain", (mode == "abort",)))
            self._still = still

        begun = self._leading.submit(begin)
        # Without any time left, too, one iteration is tried.
        self._leading.wait_for_future(begun, max(timeout_s, ITERATION_S), given_up)
        if not begun.cancel():
            begun.result()
            looked = self._leading.submit(lambda: None)
            self._leading.wait_for_future(looked, max(timeout_s, ITERATION_S), given_up)
            self._leading.wait_for_future(still, deadline - time.monotonic(), given_up)
        if not still.done():
            self._still = None
            raise DrainTimeoutError(timeout_s, self._work.in_flight())
        self._run("freeze")

    def flush_cache(self) -> None:
        self._run("forget")

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """Write buffers back into weights that came back without content; forget the prefixes of a lost cache.

        The weights themselves are then written by tokenspeed's own update calls.
        """
        self._run("repair", tuple(lost))

    def _run(self, name: str, *arguments: Any) -> None:
        """Have every rank carry out a command; raise what failed on any of them."""
        (self._several or self._leading).run(name, *arguments)

    def _note(self) -> None:
        """The loop has processed what it received. In its thread."""
        if (still := self._still) is not None and self._work.is_still():
            self._still = None
            still.set_result(None)


def check(loop: Any) -> None:
    """Raise ConfigurationError if ``loop`` cannot be served; the message says why."""
    if lacking := [path for path in NAMES if not _has(loop, path)]:
        raise ConfigurationError(
            f"this version of tokenspeed cannot be served: its EventLoop has no {', '.join(lacking)}; "
            "docs/tokenspeed.md lists versions that can"
        )
    mapping = loop.server_args.mapping
    problem = ""
    if ms.enabled() and not loop.server_args.enable_memory_saver:
        problem = "its memory is in no region; start it with --enable-memory-saver"
    elif ms.enabled() and not _is_ours():
        problem = "it uses another torch_memory_saver; install memsaver-torch-memory-saver in place of that"
    elif mapping.attn.tp_size != mapping.world_size:
        problem = "its ranks are more than one tensor-parallel group; run a server for each group"
    elif getattr(loop.server_args, "nnodes", 1) > 1:
        problem = "its ranks are on several hosts"
    elif loop.server_args.disaggregation_mode != "null":
        problem = f"it is the {loop.server_args.disaggregation_mode} side of a disaggregated engine"
    elif not loop._memory._kv_cache_release_allowed:
        problem = "its scheduler cannot forget cached prefixes; start it with --no-enable-prefix-caching"
    if problem:
        raise ConfigurationError(f"tokenspeed's scheduler cannot be served: {problem}")


def _has(owner: Any, path: str) -> bool:
    for name in path.split("."):
        if not hasattr(owner, name):
            return False
        owner = getattr(owner, name)
    return True


def _is_ours() -> bool:
    """Whether tokenspeed's adapter imported memsaver's module under the name ``torch_memory_saver``."""
    adapter = importlib.import_module("tokenspeed.runtime.utils.torch_memory_saver_adapter")
    return getattr(getattr(adapter, "torch_memory_saver", None), "__name__", "").startswith("memsaver_core.")
