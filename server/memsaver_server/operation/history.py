"""The operations that are remembered, by id and by Idempotency-Key."""

from __future__ import annotations

from typing import Generic, TypeVar

from memsaver_core.contract.errors import IdempotencyKeyError
from memsaver_core.contract.requests import Asked
from memsaver_server.operation.operation import Operation

#: Idempotency-Keys that are remembered for each operation: those of its last callers.
MAX_KEYS = 1024

_Operation = TypeVar("_Operation", bound=Operation)


class History(Generic[_Operation]):
    """All operations that have not ended, and the last ones that have. One thread at a time may use it."""

    def __init__(self, limit: int) -> None:
        """``limit`` is how many that have ended are remembered."""
        self._limit = limit
        self._by_id: dict[str, _Operation] = {}
        self._by_key: dict[str, tuple[object, _Operation]] = {}

    def get(self, operation_id: str) -> _Operation | None:
        return self._by_id.get(operation_id)

    def recent(self) -> list[_Operation]:
        """Return the remembered operations, newest first."""
        return list(reversed(self._by_id.values()))

    def add(self, operation: _Operation) -> None:
        self._by_id[operation.id] = operation
        self.forget()

    def find_repeated(self, request: Asked, key: str | None) -> _Operation | None:
        """Return the operation that a call under ``key`` got before, unless that failed or its lease ended.

        Raises:
            IdempotencyKeyError: the call before was another request.
        """
        if key is None or key not in self._by_key:
            return None
        first, operation = self._by_key[key]
        if first != request.identity():
            raise IdempotencyKeyError(
                f"Idempotency-Key {key!r} belongs to {operation.request.operation} {operation.id}, a different "
                "request; use a new key for a new request"
            )
        if operation.answers_repeats:
            return operation
        del self._by_key[key]
        operation.keys.remove(key)  # which names another operation from now on
        return None

    def add_key(self, key: str | None, request: Asked, operation: _Operation) -> None:
        """Remember that a call under ``key`` got ``operation``, unless another one has before."""
        if key is None or key in self._by_key:
            return
        self._by_key[key] = (request.identity(), operation)
        operation.keys.append(key)
        if len(operation.keys) > MAX_KEYS:
            self._by_key.pop(operation.keys.pop(0), None)

    def forget(self) -> None:
        """Forget the oldest that have ended, with their keys, if they are more than the limit."""
        ended = [operation for operation in self._by_id.values() if operation.has_ended]
        for operation in ended[: max(0, len(ended) - self._limit)]:
            del self._by_id[operation.id]
            for key in operation.keys:
                self._by_key.pop(key, None)
