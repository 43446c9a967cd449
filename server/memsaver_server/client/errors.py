"""What a call can end in, other than success. Each class is one thing that a caller does differently."""

from __future__ import annotations

from typing import Any


class ClientError(Exception):
    """Base of every error that the clients raise."""


class UnreachableError(ClientError):
    """No answer came: nothing listens there, or the connection broke on every attempt.

    Attributes:
        address: where the client looked.
    """

    def __init__(self, address: str, reason: str, attempts: int) -> None:
        self.address = address
        tried = f" after {attempts} attempts" if attempts > 1 else ""
        super().__init__(f"no answer from {address}{tried}: {reason}")


class AnswerError(ClientError):
    """The service answered, and not with success.

    Attributes:
        status: the HTTP status.
        kind: what it is in one word, e.g. ``unknown_tag``; empty where the service did not say.
        body: the JSON object of the answer, empty where it was none.
    """

    def __init__(self, status: int, message: str, body: dict[str, Any] | None = None) -> None:
        self.status = status
        self.body = body or {}
        self.kind = str(self._details.get("type") or "")
        super().__init__(message)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the operation needs, where memory was short, else 0."""
        return int(self._details.get("needed_bytes") or 0)

    @property
    def free_bytes(self) -> int:
        """Bytes that were free, where memory was short, else 0."""
        return int(self._details.get("free_bytes") or 0)

    @property
    def _details(self) -> dict[str, Any]:
        details = self.body.get("error")
        return details if isinstance(details, dict) else {}


class InvalidRequestError(AnswerError):
    """The request cannot be served as it is: an unknown tag, a malformed body. Everything is as it was."""


class UnauthorizedError(AnswerError):
    """The API key is missing or wrong."""


class ConflictError(AnswerError):
    """A conflicting operation is in progress; the message names it."""


class UnavailableError(AnswerError):
    """Not now: admission is closed because memory is released, or too many operations wait.

    Attributes:
        retry_after_s: when the service suggests to come back, or None.
    """

    retry_after_s: float | None = None


class DeviceMemoryError(UnavailableError):
    """The device has too little free memory to resume. All of it is still released, and the call can be repeated."""


class HostMemoryError(AnswerError):
    """Host memory for the backup is short. Nothing was released."""


class DrainDeadlineError(AnswerError):
    """Requests in flight did not end in time. Nothing was released and the engine serves on."""


class PhaseDeadlineError(AnswerError):
    """A phase made no progress for too long. The operation goes on; the message says where to ask for its end."""


_BY_KIND: dict[str, type[AnswerError]] = {
    "out_of_device_memory": DeviceMemoryError,
    "out_of_host_memory": HostMemoryError,
    "drain_timeout": DrainDeadlineError,
    "phase_timeout": PhaseDeadlineError,
}
_BY_STATUS: dict[int, type[AnswerError]] = {
    401: UnauthorizedError,
    403: UnauthorizedError,
    409: ConflictError,
    503: UnavailableError,
    507: HostMemoryError,
}


def error_for(status: int, body: object, text: str, retry_after: str | None) -> AnswerError:
    """Return the error that an answer stands for."""
    fields = body if isinstance(body, dict) else {}
    message = str(fields.get("message") or fields.get("detail") or text.strip()[:300] or f"HTTP {status}")
    details = fields.get("error")
    kind = str(details.get("type") or "") if isinstance(details, dict) else ""
    fallback = InvalidRequestError if 400 <= status < 500 else AnswerError
    error = _BY_KIND.get(kind, _BY_STATUS.get(status, fallback))(status, message, fields)
    if isinstance(error, UnavailableError) and retry_after and retry_after.isdigit():
        error.retry_after_s = float(retry_after)
    return error
