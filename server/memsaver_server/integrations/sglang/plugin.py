"""Serves SGLang's scheduler from its own process: attached by SGLang's plugin entry point, or by hand (``attach``)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memsaver_core.errors import ConfigurationError

if TYPE_CHECKING:
    from memsaver_server import Attachment

#: Where to serve: ``HOST:PORT``, or the path of a Unix socket. Nothing is attached if it is not set.
VARIABLE = "MEMSAVER_SGLANG"


def register() -> None:
    """SGLang's plugin entry point: serve each scheduler of this process at ``MEMSAVER_SGLANG``, if that is set."""
    if not os.environ.get(VARIABLE):
        return
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.run_event_loop", _attached, hooks.HookType.AROUND
    )


def attach(scheduler: Any, **options: Any) -> Attachment:
    """Serve a SGLang ``Scheduler`` from a thread of its process: call it before ``scheduler.run_event_loop()``.

    Args:
        scheduler: the first rank of an engine that was started with ``--enable-memory-saver``. All other ranks call
            ``follow`` at the same time.
        options: as for ``memsaver_server.attach``.

    Raises:
        ConfigurationError: this scheduler cannot be served, or the address cannot be bound.
    """
    # Not at the import, which SGLang does in each of its processes.
    from memsaver_server import attach as serve
    from memsaver_server.integrations.sglang.engine import SglangEngine

    engine = SglangEngine(scheduler)
    attachment = serve(engine, **options)
    engine.on_weights_updated = attachment.lifecycle.weights_updated
    return attachment


def follow(scheduler: Any) -> None:
    """Let the service on the first rank release this one's memory: call it before ``scheduler.run_event_loop()``.

    Raises:
        ConfigurationError: this scheduler cannot be served.
    """
    from memsaver_server.integrations.sglang import engine, event_loop, ranks, work

    engine.check(scheduler)
    ranks.join(scheduler, event_loop.EventLoop(scheduler, work.SchedulerWork(scheduler)))


def _attached(run_event_loop: Callable[..., None], scheduler: Any) -> None:
    from memsaver_server.integrations.sglang.ranks import is_first

    if not is_first(scheduler):
        follow(scheduler)
        run_event_loop(scheduler)
        return
    with attach(scheduler, **address(os.environ[VARIABLE])):
        run_event_loop(scheduler)


def address(value: str) -> dict[str, Any]:
    """Return ``HOST:PORT`` or a path as arguments of ``attach``.

    Raises:
        ConfigurationError: it is neither.
    """
    host, colon, port = value.rpartition(":")
    if colon and port.isdecimal():
        return {"host": host.strip("[]"), "port": int(port)}
    if "/" in value:
        return {"uds": value}
    raise ConfigurationError(f"{VARIABLE}={value!r} is not an address; give HOST:PORT, or the path of a Unix socket")
