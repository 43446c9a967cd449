"""Typed clients of the service, sync and async: ``Client`` and ``AsyncClient``.

They need httpx and pydantic, but neither torch nor FastAPI. Memory calls are idempotent (a repeat joins the operation
in flight), so the clients repeat them after a lost connection or answer, with the same ``Idempotency-Key``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from memsaver_server.client.address import DEFAULT_URL

if TYPE_CHECKING:
    from memsaver_server.client.aio import AsyncClient
    from memsaver_server.client.errors import (
        AnswerError,
        ClientError,
        ConflictError,
        DeviceMemoryError,
        DrainDeadlineError,
        HostMemoryError,
        InvalidRequestError,
        OperationCancelledError,
        PhaseDeadlineError,
        UnauthorizedError,
        UnavailableError,
        UnreachableError,
    )
    from memsaver_server.client.requests import Event
    from memsaver_server.client.sync import Client
    from memsaver_server.schemas import AcceptedAnswer, OccupationAnswer, OperationAnswer, OperationStatusAnswer

__all__ = [
    "DEFAULT_URL",
    "AcceptedAnswer",
    "AnswerError",
    "AsyncClient",
    "Client",
    "ClientError",
    "ConflictError",
    "DeviceMemoryError",
    "DrainDeadlineError",
    "Event",
    "HostMemoryError",
    "InvalidRequestError",
    "OccupationAnswer",
    "OperationAnswer",
    "OperationCancelledError",
    "OperationStatusAnswer",
    "PhaseDeadlineError",
    "UnauthorizedError",
    "UnavailableError",
    "UnreachableError",
]

#: Modules of the names that are not in ``client.errors``. They are imported at the first use of a name: httpx and the
#: schemas take longer than the help of a command.
_MODULES = {
    "AcceptedAnswer": "schemas",
    "AsyncClient": "client.aio",
    "Client": "client.sync",
    "Event": "client.requests",
    "OccupationAnswer": "schemas",
    "OperationAnswer": "schemas",
    "OperationStatusAnswer": "schemas",
}

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"memsaver_server.{_MODULES.get(name, 'client.errors')}"), name)
