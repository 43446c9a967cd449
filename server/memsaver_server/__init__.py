"""The memsaver service: release and resume an inference engine's device memory over HTTP.

``attach(engine)`` serves from a thread of the engine's process; ``create_app(engine)`` returns the ASGI application for
an engine that has its own server. ``Gate`` and ``ModuleEngine`` are engines for programs without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsaver_server.app import create_app
    from memsaver_server.attachment import Attachment, attach
    from memsaver_server.client import AsyncClient, Client
    from memsaver_server.engine.gate import Gate
    from memsaver_server.integrations.module.engine import ModuleEngine
    from memsaver_server.settings import Settings

__all__ = ["AsyncClient", "Attachment", "Client", "Gate", "ModuleEngine", "Settings", "attach", "create_app"]

_MODULES = {
    "AsyncClient": "client",
    "Attachment": "attachment",
    "Client": "client",
    "Gate": "engine.gate",
    "ModuleEngine": "integrations.module.engine",
    "Settings": "settings",
    "attach": "attachment",
    "create_app": "app",
}


def __getattr__(name: str) -> Any:
    # Imported at first use: the command line and the clients need neither torch nor FastAPI.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"memsaver_server.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("memsaver"):
            raise
        from memsaver_server.missing_package import missing_package

        raise ImportError(f"memsaver_server.{name}: {missing_package(error, 'server')}") from None
