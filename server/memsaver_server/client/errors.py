"""The errors of the clients: one class per way in which a caller reacts."""

from __future__ import annotations

from typing import Any


class ClientError(Exception):
    """Base of every error that the clients raise."""


class UnreachableError(ClientError):
    """No answer: nothing listens at ``address``, or the connection broke on every attempt."""

    def __init__(self, address: str, reason: str, attempts: int) -> None:
        self.address = address
        tried = f" after {attempts} attempts" if attempts > 1 else ""
        super().__init__(f"no answer from {address}{tried}: {reason}")


class AnswerError(ClientError):
    """The service answered with an error.

    Attributes:
        status: the HTTP status.
        kind: the error in one word, e.g. ``unknown_tag``; empty if the service sent none.
        body: the JSON object of the answer, or an empty one.
    """

    def __init__(self, status: int, message: str, body: dict[str, Any] | None = None) -> None:
        self.status = status
        self.body = body or {}
        self.kind = str(self._details.get("type") or "")
        super().__init__(message)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the operation needs if memory was short, else 0."""
        return self._bytes("needed_bytes") or 0

    @property
    def free_bytes(self) -> int:
        """Bytes that were free if memory was short, else 0."""
        return self._bytes("free_bytes") or 0

    @property
    def held_bytes(self) -> int | None:
        """Bytes that the tags of a release hold if ``at_least_bytes`` is more, else None."""
        return self._bytes("held_bytes")

    def _bytes(self, name: str) -> int | None:
        count = self._details.get(name)
        return count if isinstance(count, int) else None

    @property
    def _details(self) -> dict[str, Any]:
        details = self.body.get("error")
        return details if isinstance(details, dict) else {}


class InvalidRequestError(AnswerError):
    """The request is invalid: an unknown tag, a malformed body. Nothing was changed."""


class UnauthorizedError(AnswerError):
    """The API key is missing or wrong."""


class ConflictError(AnswerError):
    """A conflicting operation is in progress; the message names it."""


class OperationCancelledError(AnswerError):
    """Another caller has cancelled the operation; the message names it. Memory is as before."""


class UnavailableError(AnswerError):
    """Admission is closed because memory is released, or too many operations wait. Retry later.

    Attributes:
        retry_after_s: when the service suggests to retry, or None.
    """

    retry_after_s: float | None = None


class DeviceMemoryError(UnavailableError):
    """The device has too little free memory to resume or to grow. All is as before, and the call can be repeated."""


class HostMemoryError(AnswerError):
    """Host memory for the backup is short. Nothing was released."""


class DrainDeadlineError(AnswerError):
    """Requests in flight did not end in time. Nothing was released and the engine continues to serve."""


class PhaseDeadlineError(AnswerError):
    """A phase made no progress for too long. The operation continues; the message names its address."""


#: By the kind of the error; by status if the kind has no entry or the answer, e.g. of a proxy, has no kind.
_CLASSES: dict[str | int, type[AnswerError]] = {
    "out_of_device_memory": DeviceMemoryError,
    "out_of_host_memory": HostMemoryError,
    "drain_timeout": DrainDeadlineError,
    "phase_timeout": PhaseDeadlineError,
    "cancelled": OperationCancelledError,
    401: UnauthorizedError,
    403: UnauthorizedError,
    409: ConflictError,
    503: UnavailableError,
    507: HostMemoryError,
}


def class_for(kind: str, status: int) -> type[AnswerError]:
    return _CLASSES.get(kind) or _CLASSES.get(status, InvalidRequestError if 400 <= status < 500 else AnswerError)


def error_for(status: int, body: object, text: str, retry_after: str | None) -> AnswerError:
    fields = body if isinstance(body, dict) else {}
    message = str(fields.get("message") or fields.get("detail") or text.strip()[:300] or f"HTTP {status}")
    error = AnswerError(status, message, fields)
    error = class_for(error.kind, status)(status, message, fields)
    if isinstance(error, UnavailableError) and retry_after and retry_after.isdigit():
        error.retry_after_s = float(retry_after)
    return error
