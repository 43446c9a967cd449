"""Typed clients of the service, sync and async: ``Client`` and ``AsyncClient``.

They need httpx and pydantic, but neither torch nor FastAPI. Memory calls are idempotent (a repeat joins the operation
in flight), so the clients repeat them after a lost connection or answer, with the same ``Idempotency-Key``.
"""

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
from memsaver_server.client.requests import DEFAULT_URL, Event
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
