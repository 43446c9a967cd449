"""tokenspeed as an ``Engine``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memsaver_core.errors import ConfigurationError, UnsupportedError
from memsaver_server.engine import DrainMode, check_drain_mode, never
from memsaver_server.integrations.scheduler_loop.checks import lacking, memory_problem
from memsaver_server.integrations.scheduler_loop.engine import LoopEngine
from memsaver_server.integrations.tokenspeed import port
from memsaver_server.integrations.tokenspeed.controls import Controls
from memsaver_server.integrations.tokenspeed.work import LoopWork
from memsaver_server.settings import Settings

if TYPE_CHECKING:
    from memsaver_server.lifecycle import Lifecycle

#: What an event loop must have, by the path to it.
NAMES = (
    "_memory._kv_cache_release_allowed", "_memory._kv_repair", "_memory._reset_caches", "_pause._abort_all_pending",
    "_pause.buffered_specs", "_pause.is_drain_pending", "_pause.released", "_pause.state", "attn_tp_cpu_group",
    "output_processor.rid_to_state", "request_handler.grammar_manager", "request_handler.process_requests",
    "request_handler.recv_func", "request_handler.recv_reqs", "request_handler.send_func", "scheduler",
    "server_args.mapping.attn",
)  # fmt: skip


class TokenspeedEngine(LoopEngine):
    """An engine over an ``EventLoop``.

    By tokenspeed alone requests wait while memory is released, and each holds a lock that a weight update waits for; so
    they are refused, or wait up to a number.
    """

    name = "tokenspeed"

    @property
    def model_name(self) -> str:
        return str(self._event_loop.server_args.model)

    def __init__(self, event_loop: Any) -> None:
        """Take over the intake of ``event_loop``, before it runs.

        Raises:
            ConfigurationError: this loop cannot be served; the message says why.
        """
        check(event_loop)
        self._event_loop = event_loop
        work = LoopWork(event_loop)
        super().__init__(work, port.lead(event_loop, work), port.group(event_loop))

    def take_controls(self, lifecycle: Lifecycle, settings: Settings) -> None:
        self.loop.take = Controls(self, self._event_loop.request_handler, lifecycle, settings).take

    # The methods of ``Engine``.

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self.loop.tell("close", reason, hold)

    def open_admission(self) -> None:
        self.loop.tell("open")

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
        self.when_still(timeout_s, begin=lambda: self.loop.tell("drain", mode == "abort"), given_up=given_up)
        self._run("freeze")
        self._run("")  # from this iteration on the loop makes no call of CUDA: port.stay_while_frozen


def start(event_loop: Any, service: bool) -> TokenspeedEngine | None:
    """As ``plugin.served`` has it."""
    check(event_loop)
    if event_loop.attn_tp_rank == 0:
        return TokenspeedEngine(event_loop)
    port.join(event_loop)
    return None


def check(loop: Any) -> None:
    """Raise ConfigurationError if ``loop`` cannot be served; the message says why."""
    if missing := lacking(loop, NAMES):
        raise ConfigurationError(
            f"this version of tokenspeed cannot be served: its EventLoop has no {', '.join(missing)}; "
            "docs/tokenspeed.md lists versions that can"
        )
    mapping = loop.server_args.mapping
    adapter = "tokenspeed.runtime.utils.torch_memory_saver_adapter"
    if problem := memory_problem(loop.server_args.enable_memory_saver, adapter):
        pass
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
