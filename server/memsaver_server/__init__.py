"""The memsaver service: release and resume an inference engine's device memory over HTTP.

``attach(engine)`` serves from a thread of the engine's own process; ``create_app(engine)`` is the ASGI application
alone, for an engine that runs a server of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsaver_server.attachment import Attachment, attach
    from memsaver_server.http.app import create_app
    from memsaver_server.settings import Settings

__all__ = ["Attachment", "Settings", "attach", "create_app"]

_HOMES = {
    "Attachment": "memsaver_server.attachment",
    "Settings": "memsaver_server.settings",
    "attach": "memsaver_server.attachment",
    "create_app": "memsaver_server.http.app",
}


def __getattr__(name: str) -> Any:
    # Loaded at first use: the command line and the client need neither torch nor a web framework.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
