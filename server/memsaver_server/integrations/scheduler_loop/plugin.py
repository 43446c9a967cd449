"""How a scheduler's own process serves it."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memsaver_core.errors import ConfigurationError

if TYPE_CHECKING:
    from memsaver_server import Attachment, Settings
    from memsaver_server.integrations.scheduler_loop.engine import LoopEngine
    from memsaver_server.operation import Operation

logger = logging.getLogger("memsaver")


def is_installed() -> bool:
    """Whether ``import torch_memory_saver`` gives memsaver's."""
    if "torch_memory_saver" in sys.modules:
        return sys.modules["torch_memory_saver"].__name__.startswith("memsaver_core.")
    found = importlib.util.find_spec("torch_memory_saver")
    return found is not None and "memsaver_core" in (found.origin or "")


def attach(engine: LoopEngine, settings: Settings | None, **options: Any) -> Attachment:
    """Serve ``engine``, and have the service's lifecycle carry out its own calls, too.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    # Not at the import, which engines do in each of their processes.
    from memsaver_server import Settings
    from memsaver_server import attach as serve

    settings = settings or Settings()
    attachment = serve(engine, settings=settings, **options)
    engine.take_controls(attachment.lifecycle, settings)
    return attachment


@contextmanager
def without_service(engine: LoopEngine) -> Iterator[None]:
    """Have a lifecycle carry out the own calls of ``engine``."""
    import memsaver_core as ms
    from memsaver_server import Settings
    from memsaver_server.lifecycle import Lifecycle

    settings = Settings()
    lifecycle = Lifecycle(engine, settings, _log)
    engine.take_controls(lifecycle, settings)
    if ms.core_settings().prepare_backup:
        engine.memory.prepare_backup()
    try:
        yield
    finally:
        lifecycle.operations.close()


@contextmanager
def served(variable: str, releasable: bool, start: Callable[[bool], LoopEngine | None]) -> Iterator[None]:
    """Serve a scheduler at the address in ``variable``; without an address, carry out its own calls.

    Args:
        releasable: whether the engine was asked to put its memory into regions.
        start: returns the engine on the rank that receives requests; has another rank follow that, and returns None. Is
            told whether a service is wanted, and raises ConfigurationError if the scheduler cannot be served.

    Raises:
        ConfigurationError: a service is wanted, and the scheduler cannot be served, or the address cannot be bound.
    """
    where = os.environ.get(variable)
    engine = None
    try:
        if where or releasable:
            engine = start(bool(where))
    except ConfigurationError as refused:
        if where:
            raise
        logger.warning("the engine's own memory calls stay as they are: %s", refused)
    if engine is None:
        yield
        return
    with attach(engine, None, **address(where, variable)) if where else without_service(engine):
        yield


def address(value: str, variable: str) -> dict[str, Any]:
    """Return ``HOST:PORT`` or a path as arguments of ``attach``.

    Raises:
        ConfigurationError: it is neither.
    """
    host, colon, port = value.rpartition(":")
    if colon and port.isdecimal():
        return {"host": host.strip("[]"), "port": int(port)}
    if "/" in value:
        return {"uds": value}
    raise ConfigurationError(f"{variable}={value!r} is not an address; give HOST:PORT, or the path of a Unix socket")


def _log(operation: Operation) -> None:
    logger.info("%s %s in %.3f s", operation.request.operation, operation.status, operation.seconds)
