"""Serves tokenspeed's scheduler from its own process: attached by the entry point ``tokenspeed.plugins``, by
``serve.py`` for versions without it, or by hand (``attach``)."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memsaver_server.integrations.scheduler_loop import plugin

if TYPE_CHECKING:
    from memsaver_server import Attachment, Settings

#: Where to serve: ``HOST:PORT``, or the path of a Unix socket. If it is not set, there is no service.
VARIABLE = "MEMSAVER_TOKENSPEED"


@functools.cache
def register() -> None:
    """Carry out the memory calls of each engine of this process whose memory is in memsaver's regions, and serve it at
    ``MEMSAVER_TOKENSPEED`` if that is set."""
    if not (os.environ.get(VARIABLE) or plugin.is_installed()):
        return
    from memsaver_server.integrations.tokenspeed import workspaces

    module: Any = importlib.import_module("tokenspeed.runtime.engine.event_loop")
    if hasattr(module, "create_attn_components"):  # in 0.1.0
        module.create_attn_components = workspaces.releasable(module.create_attn_components)
    loop = module.EventLoop
    for name in ("event_loop", "event_loop_overlap"):  # the latter up to 0.1.0
        if hasattr(loop, name):
            setattr(loop, name, _attached(getattr(loop, name)))


def attach(loop: Any, *, settings: Settings | None = None, **options: Any) -> Attachment:
    """Serve a tokenspeed ``EventLoop`` from a thread of its process: call it before ``loop.event_loop()``.

    Args:
        loop: the first rank of an engine that was started with ``--enable-memory-saver``. All other ranks call
            ``follow`` at the same time.
        settings, options: as for ``memsaver_server.attach``.

    Raises:
        ConfigurationError: this loop cannot be served, or the address cannot be bound.
    """
    # Not at the import, which tokenspeed does in each of its processes.
    from memsaver_server.integrations.tokenspeed.engine import TokenspeedEngine

    return plugin.attach(TokenspeedEngine(loop), settings, **options)


def follow(loop: Any) -> None:
    """Let the service on the first rank release this one's memory: call it before ``loop.event_loop()``.

    Raises:
        ConfigurationError: this loop cannot be served.
    """
    from memsaver_server.integrations.tokenspeed import engine, port

    engine.check(loop)
    port.join(loop)


def _attached(run: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(run)
    def served(loop: Any) -> None:
        from memsaver_server.integrations.tokenspeed.engine import start

        with plugin.served(VARIABLE, loop.server_args.enable_memory_saver, functools.partial(start, loop)):
            run(loop)

    return served
