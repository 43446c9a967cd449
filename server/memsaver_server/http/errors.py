"""Errors as HTTP responses, and the errors of requests themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memsaver_core import MemsaverError


class BadRequestError(MemsaverError):
    """The request is malformed; the message says how."""

    kind = "bad_request"
    status = 400


@dataclass(eq=False, repr=False)
class UnauthorizedError(MemsaverError):
    """The key is missing or wrong; ``reason`` says which, in one word."""

    kind = "unauthorized"
    status = 401
    reason: str


@dataclass(eq=False, repr=False)
class ForbiddenError(MemsaverError):
    """The caller may not do this, or a browser sent the request for another site; ``reason`` says why, in one word."""

    kind = "forbidden"
    status = 403
    reason: str


class NotFoundError(MemsaverError):
    """The path names something that does not exist."""

    kind = "not_found"
    status = 404


class BodyTooLargeError(MemsaverError):
    """The request's body exceeds the limit."""

    kind = "body_too_large"
    status = 413


@dataclass(frozen=True)
class ErrorResponse:
    """An error as a response; see ``MemsaverError`` for its parts."""

    status: int
    kind: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        error = {"type": self.kind, "message": self.message, **self.details}
        return {"success": False, "message": self.message, "error": error}


def error_response(error: BaseException) -> ErrorResponse:
    """Return the response to ``error``. One that is not memsaver's is a 500 that shows its type and message."""
    if not isinstance(error, MemsaverError):
        return ErrorResponse(500, "internal_error", f"{type(error).__name__}: {error}")
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return ErrorResponse(error.status, error.kind, str(error), error.details(), headers)
