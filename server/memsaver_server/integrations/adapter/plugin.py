"""Serves an engine's scheduler from the scheduler's own process."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from memsaver_core.compat import install
from memsaver_core.compat.patching import when_imported
from memsaver_core.contract.errors import ConfigurationError

if TYPE_CHECKING:
    from memsaver_server import Attachment, Settings
    from memsaver_server.integrations.adapter.engine import LoopEngine
    from memsaver_server.operation.operation import Operation

logger = logging.getLogger("memsaver")


class Plugin:
    """Serves the schedulers of one kind of engine. The environment's ``variable`` turns memsaver on, whichever
    ``torch_memory_saver`` is installed, and says where to serve: ``HOST:PORT``, or the path of a Unix socket; ``1`` for
    no service. ``adapter`` is the engine's module that imports ``torch_memory_saver``, ``engine`` our class,
    ``module:name``, which is imported once it is needed: each process imports plugins."""

    def __init__(self, variable: str, engine: str, adapter: str) -> None:
        self._variable = variable
        self._adapter = adapter
        self._engine = engine

    def starts(self) -> bool:
        """Return whether there may be anything to do in this process: the variable is set, and the engine uses
        memsaver's module from now on, or ``import torch_memory_saver`` gives it. ``0`` turns memsaver off."""
        value = os.environ.get(self._variable, "")
        if value == "0":
            return False
        if value:
            install(replace=True)
            ours = sys.modules["torch_memory_saver"]
            given = {"torch_memory_saver": ours, "_memory_saver": ours.torch_memory_saver, "import_error": None}
            # It may be imported already, with another torch_memory_saver or none.
            when_imported(self._adapter, lambda adapter: vars(adapter).update(given))
            return True
        if "torch_memory_saver" in sys.modules:
            return sys.modules["torch_memory_saver"].__name__.startswith("memsaver_core.")
        found = importlib.util.find_spec("torch_memory_saver")
        return found is not None and "memsaver_core" in (found.origin or "")

    def attach(self, scheduler: Any, *, settings: Settings | None = None, **options: Any) -> Attachment:
        """Serve the engine's own ``scheduler`` from a thread of its process; ``settings`` and ``options`` as for
        ``memsaver_server.attach``. Call it before the event loop runs, on the first rank of an engine started with
        ``--enable-memory-saver``, while all other ranks call ``follow``. Raises ConfigurationError if this scheduler
        cannot be served or is not the first rank's, or the address cannot be bound."""
        return _attach(self._lead(scheduler, attached=True), settings, **options)

    def follow(self, scheduler: Any) -> None:
        """Let the service on the first rank release this rank's memory. Call it before the event loop runs. Raises
        ConfigurationError if this scheduler cannot be served."""
        self._lead(scheduler)

    @contextmanager
    def served(self, scheduler: Any, saves_memory: bool) -> Iterator[None]:
        """Serve the engine's own ``scheduler``, whose event loop runs inside the block. If no address is set, only
        carry out the engine's own memory calls, if it ``saves_memory`` and can be served. Raises ConfigurationError if
        an address is set that cannot be bound, or the scheduler cannot be served there."""
        value = os.environ.get(self._variable, "")
        where = "" if value in ("0", "1") else value
        engine: Any = None
        try:
            if where or saves_memory:
                engine = self._lead(scheduler)
        except ConfigurationError as refused:
            if where:
                raise
            logger.warning("the engine's own memory calls stay as they are: %s", refused)
        if engine is None:
            yield
            return
        with _attach(engine, None, **address(where, self._variable)) if where else _without_service(engine):
            yield

    def _lead(self, scheduler: Any, *, attached: bool = False) -> Any:
        """Return the engine on the first rank. On another have it do what the first rank sends, and return None, or
        raise ConfigurationError if it shall be ``attached``."""
        from memsaver_server.integrations.adapter.engine import join

        engine: type[LoopEngine] = resolve_name(self._engine)
        ours = engine.scheduler_class(scheduler)
        ours.check()
        rank = ours.topology.rank
        if rank and attached:
            raise ConfigurationError(f"attach() is for the first rank, and this is rank {rank}: call follow() instead")
        return join(ours) if rank else engine(ours)


def _attach(engine: LoopEngine, settings: Settings | None, **options: Any) -> Attachment:
    """Serve ``engine``, and have the service's lifecycle carry out the engine's own calls, too."""
    from memsaver_server import Settings, attach

    settings = settings or Settings()
    attachment = attach(engine, settings=settings, **options)
    engine.take_calls(attachment.lifecycle, settings)
    return attachment


@contextmanager
def _without_service(engine: LoopEngine) -> Iterator[None]:
    """Have a lifecycle carry out the engine's own calls inside the block."""
    from memsaver_server import Settings
    from memsaver_server.engine.lifecycle import Lifecycle

    settings = Settings()

    def log(operation: Operation) -> None:
        logger.info("%s %s in %.3f s", operation.request.operation, operation.status, operation.seconds)

    lifecycle = Lifecycle(engine, settings, log)
    engine.take_calls(lifecycle, settings)
    engine.memory.prepare_backup()
    try:
        yield
    finally:
        lifecycle.operations.close()


def address(value: str, variable: str) -> dict[str, Any]:
    """Return ``HOST:PORT`` or a path as arguments of ``attach``; raise ConfigurationError if it is neither."""
    host, colon, port = value.rpartition(":")
    if colon and port.isdecimal():
        return {"host": host.strip("[]"), "port": int(port)}
    if "/" in value:
        return {"uds": value}
    raise ConfigurationError(f"{variable}={value!r} is not an address; give HOST:PORT, or the path of a Unix socket")
