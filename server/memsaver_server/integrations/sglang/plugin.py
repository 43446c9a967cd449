"""Serves SGLang's scheduler from its own process: attached by SGLang's plugin entry point, or by hand (``attach``)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from memsaver_server.integrations.scheduler_loop import plugin
from memsaver_server.integrations.sglang import frontend, nccl, prefill_graphs

if TYPE_CHECKING:
    from memsaver_server import Attachment, Settings

#: Where to serve: ``HOST:PORT``, or the path of a Unix socket. If it is not set, there is no service.
VARIABLE = "MEMSAVER_SGLANG"


def register() -> None:
    """SGLang's plugin entry point: carry out the memory calls of each engine whose memory is in memsaver's regions, and
    serve it at ``MEMSAVER_SGLANG`` if that is set."""
    if not (os.environ.get(VARIABLE) or plugin.is_installed()):
        return
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    around = hooks.HookType.AROUND
    hooks.HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", _attached, around)
    hooks.HookRegistry.register(nccl.CONFIGURE, nccl.configure, around)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    hooks.HookRegistry.register(f"{manager}.__init__", frontend.initialize, around)
    for call in frontend.CALLS:
        hooks.HookRegistry.register(f"{manager}.{call}", frontend.hook(call), around)
    if prefill_graphs.are_released():
        hooks.HookRegistry.register(f"{prefill_graphs.BACKEND}.__init__", prefill_graphs.initialize, around)


def attach(scheduler: Any, *, settings: Settings | None = None, **options: Any) -> Attachment:
    """Serve a SGLang ``Scheduler`` from a thread of its process: call it before ``scheduler.run_event_loop()``.

    Args:
        scheduler: the first rank of an engine that was started with ``--enable-memory-saver``. All other ranks call
            ``follow`` at the same time.
        settings, options: as for ``memsaver_server.attach``.

    Raises:
        ConfigurationError: this scheduler cannot be served, or the address cannot be bound.
    """
    # Not at the import, which SGLang does in each of its processes.
    from memsaver_server.integrations.sglang.engine import SglangEngine, check

    check(scheduler, service=True)
    return plugin.attach(SglangEngine(scheduler), settings, **options)


def follow(scheduler: Any) -> None:
    """Let the service on the first rank release this one's memory: call it before ``scheduler.run_event_loop()``.

    Raises:
        ConfigurationError: this scheduler cannot be served.
    """
    from memsaver_server.integrations.sglang import engine, port

    engine.check(scheduler)
    port.join(scheduler)


def _attached(run_event_loop: Callable[..., None], scheduler: Any) -> None:
    from memsaver_server.integrations.sglang.engine import start

    with plugin.served(VARIABLE, scheduler.memory_saver_adapter.enabled, partial(start, scheduler)):
        run_event_loop(scheduler)
