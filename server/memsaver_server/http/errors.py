"""What each failure is over HTTP: its status, its headers and what the body says beside the message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memsaver_core.errors import (
    BackupError,
    ConfigurationError,
    ContextLostError,
    DriverError,
    MemsaverError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    UnknownTagError,
    UnsupportedError,
)
from memsaver_server.engine import AdmissionClosedError, DrainTimeoutError
from memsaver_server.lifecycle import MemoryBusyError, NotEnoughToReleaseError, NotResidentError, UnusableError
from memsaver_server.operation_queue import (
    ConflictError,
    IdempotencyKeyError,
    PhaseTimeoutError,
    ServerEndsError,
    TooManyOperationsError,
)

#: Seconds after which a caller may try again what failed for want of memory or of admission.
RETRY_AFTER_S = 1


class BadRequestError(Exception):
    """The request cannot be understood; the message says what is wrong with it."""


class BodyTooLargeError(Exception):
    """The request's body is over the limit."""


class UnauthorizedError(Exception):
    """The key is missing or wrong."""


class ForbiddenError(Exception):
    """A browser sent the request on behalf of another site."""


class NotFoundError(Exception):
    """What the path names does not exist."""


@dataclass(frozen=True)
class Problem:
    """An error as an answer.

    Attributes:
        status: HTTP status.
        kind: what it is, in one word for programs and metrics.
        message: what it is, for people.
        details: figures and names that programs may want.
        headers: HTTP headers to send.
    """

    status: int
    kind: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        error = {"type": self.kind, "message": self.message, **self.details}
        return {"success": False, "message": self.message, "error": error}


def problem_of(error: BaseException) -> Problem:
    """Return the answer to ``error``. An error that nobody foresaw is a 500 that shows its type and message alone."""
    message = str(error)
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    match error:
        case UnknownTagError():
            return Problem(400, "unknown_tag", message, {"unknown": error.unknown, "known": error.known})
        case BadRequestError() | ConfigurationError():
            return Problem(400, "bad_request", message)
        case NotEnoughToReleaseError():
            return Problem(400, "not_enough_to_release", message)
        case UnauthorizedError():
            return Problem(401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"})
        case ForbiddenError():
            return Problem(403, "forbidden", message)
        case NotFoundError():
            return Problem(404, "not_found", message)
        case UnsupportedError():
            return Problem(409, "unsupported", message)
        case ConflictError():
            running = error.running
            named = {"operation": running.request.operation, "operation_id": running.id}
            return Problem(409, "conflict", message, named, retry)
        case NotResidentError():
            return Problem(409, "not_resident", message)
        case BodyTooLargeError():
            return Problem(413, "body_too_large", message)
        case IdempotencyKeyError():
            return Problem(422, "idempotency_key_reused", message)
        case TooManyOperationsError():
            return Problem(503, "too_many_operations", message, headers=retry)
        case ServerEndsError():
            return Problem(503, "server_ends", message)
        case AdmissionClosedError():
            return Problem(503, "admission_closed", message, headers=retry)
        case OutOfDeviceMemoryError():
            return Problem(503, "out_of_device_memory", message, _needs(error), retry)
        case OutOfHostMemoryError():
            return Problem(507, "out_of_host_memory", message, _needs(error))
        case DrainTimeoutError():
            pending = {"phase": "drain", "pending": list(error.pending)}
            return Problem(504, "drain_timeout", message, pending)
        case PhaseTimeoutError():
            stuck = {"phase": error.phase, "operation_id": error.operation.id}
            return Problem(504, "phase_timeout", message, stuck)
        case MemoryBusyError():
            return Problem(504, "memory_busy", message, {"phase": error.phase})
        case ContextLostError() | UnusableError():
            return Problem(500, "context_lost", message, _driver(error))
        case DriverError():
            return Problem(500, "driver_error", message, _driver(error))
        case BackupError():
            where = {"tag": error.tag, "address": error.address, "bytes": error.bytes}
            return Problem(500, "backup_error", message, where)
        case MemsaverError():
            return Problem(500, "error", message)
        case _:
            return Problem(500, "internal_error", f"{type(error).__name__}: {message}")


def _needs(error: OutOfDeviceMemoryError | OutOfHostMemoryError) -> dict[str, Any]:
    return {"needed_bytes": error.needed_bytes, "free_bytes": error.free_bytes}


def _driver(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, DriverError):
        return {}
    return {"call": error.call, "code": error.code, "tag": error.tag, "bytes": error.bytes}
