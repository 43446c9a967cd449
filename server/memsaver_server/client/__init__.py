"""Typed clients of the service, sync and async: ``Client`` and ``AsyncClient``.

They need httpx and pydantic, but neither torch nor FastAPI. Memory calls are idempotent (a repeat joins the operation
in flight), so the clients repeat them after a lost connection or answer, with the same ``Idempotency-Key``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from memsaver_server.address import DEFAULT_URL
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

if TYPE_CHECKING:
    from memsaver_core.contract.reports import AcceptedAnswer, OperationAnswer, OperationStatusAnswer
    from memsaver_core.contract.status import OccupationAnswer
    from memsaver_server.client.aio import AsyncClient
    from memsaver_server.client.requests import Event
    from memsaver_server.client.sync import Client

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

#: The modules of what is imported at its first use: httpx and the models take longer than the help of a command.
_MODULES = {
    "AcceptedAnswer": "memsaver_core.contract.reports",
    "AsyncClient": "memsaver_server.client.aio",
    "Client": "memsaver_server.client.sync",
    "Event": "memsaver_server.client.requests",
    "OccupationAnswer": "memsaver_core.contract.status",
    "OperationAnswer": "memsaver_core.contract.reports",
    "OperationStatusAnswer": "memsaver_core.contract.reports",
}

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name]), name)
