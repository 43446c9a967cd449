"""Serves SGLang's scheduler from its own process: attached by SGLang's plugin entry point, or by hand (``attach``)."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memsaver_core.errors import ConfigurationError
from memsaver_server.integrations.sglang import frontend, prefill_graphs

if TYPE_CHECKING:
    from memsaver_server import Attachment, Settings
    from memsaver_server.operation import Operation

#: Where to serve: ``HOST:PORT``, or the path of a Unix socket. If it is not set, there is no service.
VARIABLE = "MEMSAVER_SGLANG"

logger = logging.getLogger("memsaver")


def register() -> None:
    """SGLang's plugin entry point: carry out the memory calls of each engine whose memory is in memsaver's regions, and
    serve it at ``MEMSAVER_SGLANG`` if that is set."""
    if not (os.environ.get(VARIABLE) or _is_installed()):
        return
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    around = hooks.HookType.AROUND
    hooks.HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_event_loop", _attached, around)
    for call in frontend.CALLS:
        target = f"sglang.srt.managers.tokenizer_manager.TokenizerManager.{call}"
        hooks.HookRegistry.register(target, frontend.hook(call), around)
    if prefill_graphs.are_released():
        hooks.HookRegistry.register(f"{prefill_graphs.BACKEND}.__init__", prefill_graphs.initialize, around)


def _is_installed() -> bool:
    """Whether ``import torch_memory_saver`` gives memsaver's."""
    if "torch_memory_saver" in sys.modules:
        return sys.modules["torch_memory_saver"].__name__.startswith("memsaver_core.")
    found = importlib.util.find_spec("torch_memory_saver")
    return found is not None and "memsaver_core" in (found.origin or "")


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
    from memsaver_server import Settings
    from memsaver_server import attach as serve
    from memsaver_server.integrations.sglang.engine import SglangEngine, check

    check(scheduler, service=True)
    settings = settings or Settings()
    engine = SglangEngine(scheduler)
    attachment = serve(engine, settings=settings, **options)
    engine.take_controls(attachment.lifecycle, settings)
    return attachment


@contextmanager
def controls(scheduler: Any) -> Iterator[None]:
    """As ``attach``, without a service: carry out SGLang's own memory calls alone.

    Raises:
        ConfigurationError: this scheduler cannot be served.
    """
    import memsaver_core as ms
    from memsaver_server import Settings
    from memsaver_server.engine import memory_of
    from memsaver_server.integrations.sglang.engine import SglangEngine
    from memsaver_server.lifecycle import Lifecycle

    settings = Settings()
    engine = SglangEngine(scheduler)
    lifecycle = Lifecycle(engine, settings, _log)
    engine.take_controls(lifecycle, settings)
    if ms.core_settings().prepare_backup:
        memory_of(engine).prepare_backup()
    try:
        yield
    finally:
        lifecycle.operations.close()


def follow(scheduler: Any) -> None:
    """Let the service on the first rank release this one's memory: call it before ``scheduler.run_event_loop()``.

    Raises:
        ConfigurationError: this scheduler cannot be served.
    """
    from memsaver_server.integrations.sglang import engine, event_loop, ranks, work

    engine.check(scheduler)
    ranks.join(scheduler, event_loop.EventLoop(scheduler, work.SchedulerWork(scheduler)))


def _log(operation: Operation) -> None:
    logger.info("%s %s in %.3f s", operation.request.operation, operation.status, operation.seconds)


def _attached(run_event_loop: Callable[..., None], scheduler: Any) -> None:
    from memsaver_server.integrations.sglang import engine
    from memsaver_server.integrations.sglang.ranks import is_first

    where = os.environ.get(VARIABLE)
    if not where and not scheduler.memory_saver_adapter.enabled:
        run_event_loop(scheduler)
        return
    try:
        engine.check(scheduler, service=bool(where))
    except ConfigurationError as refused:
        if where:
            raise
        logger.warning("SGLang's own memory calls stay as they are, and need an idle engine: %s", refused)
        run_event_loop(scheduler)
        return
    if not is_first(scheduler):
        follow(scheduler)
        run_event_loop(scheduler)
        return
    with attach(scheduler, **address(where)) if where else controls(scheduler):
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
