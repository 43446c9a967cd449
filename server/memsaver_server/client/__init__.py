"""Typed clients of the service, sync and async: ``Client`` and ``AsyncClient``.

They need neither torch nor a GPU. Every memory call may be sent twice without harm (the service is idempotent, and a
repeat joins the operation in flight), so a lost connection or a lost answer is repeated here, with the same
``Idempotency-Key``. Answers are the service's own types; errors
are one class for each thing that a caller does differently.
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
    PhaseDeadlineError,
    UnauthorizedError,
    UnavailableError,
    UnreachableError,
)
from memsaver_server.client.events import Event
from memsaver_server.client.requests import DEFAULT_URL
from memsaver_server.client.sync import Client
from memsaver_server.schemas import (
    AcceptedAnswer,
    OccupationAnswer,
    OperationAnswer,
    OperationStatusAnswer,
)

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
    "OperationStatusAnswer",
    "PhaseDeadlineError",
    "UnauthorizedError",
    "UnavailableError",
    "UnreachableError",
]
