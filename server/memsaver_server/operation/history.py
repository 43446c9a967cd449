"""The operations that are remembered, and the Idempotency-Keys of their callers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from memsaver_core.contract.errors import IdempotencyKeyError, NotFoundError
from memsaver_core.contract.requests import Asked
from memsaver_server import clock
from memsaver_server.operation.operation import Operation

#: How long an Idempotency-Key, or the id of an operation, stands for its request, seconds.
KEPT_S = 24 * 3600.0
#: Keys, or ids, that are kept at most; a few KiB each.
MAX_KEPT = 4096

_Operation = TypeVar("_Operation", bound=Operation)


def reused(first: str, key: str | None, operation_id: str = "") -> IdempotencyKeyError:
    """Return the error of a call whose key, or id if it has no key, already belongs to the request ``first``."""
    name, noun = (f"operation_id {operation_id!r}", "id") if key is None else (f"Idempotency-Key {key!r}", "key")
    return IdempotencyKeyError(f"{name} belongs to {first}, a different request; use a new {noun} for a new request")


class History(Generic[_Operation]):
    """All operations that have not ended, and the last ``limit`` that have. One thread at a time may use it."""

    def __init__(self, limit: int, on_forgotten: Callable[[_Operation], None] = lambda _: None) -> None:
        self._limit = limit
        self._on_forgotten = on_forgotten
        self._by_id: dict[str, _Operation] = {}

    def get(self, operation_id: str) -> _Operation | None:
        return self._by_id.get(operation_id)

    def find(self, operation_id: str) -> _Operation:
        """As ``get``; raise NotFoundError if it is not remembered."""
        if (found := self._by_id.get(operation_id)) is None:
            raise NotFoundError(f"no operation {operation_id!r} is remembered; GET /operations lists those that are")
        return found

    def recent(self) -> list[_Operation]:
        return list(reversed(self._by_id.values()))

    def running(self) -> list[_Operation]:
        """Return those that have not ended, the oldest first."""
        return [operation for operation in self._by_id.values() if not operation.has_ended]

    def add(self, operation: _Operation) -> None:
        self._by_id.pop(operation.id, None)  # a failed operation of this id is repeated
        self._by_id[operation.id] = operation
        self.forget()

    def forget(self) -> None:
        """Forget the oldest that have ended, if they are more than the limit."""
        ended = [operation for operation in self._by_id.values() if operation.has_ended]
        for operation in ended[: max(0, len(ended) - self._limit)]:
            del self._by_id[operation.id]
            self._on_forgotten(operation)


class Keys:
    """The Idempotency-Keys of an engine's callers: each stands for one request.

    A key is kept for ``KEPT_S`` after it was sent last, however many operations came since; beyond ``MAX_KEPT`` those
    sent longest ago are dropped. One that was dropped counts as new: its request is carried out, and the answer says
    what that did. A key is never answered by the operation of another request. One thread at a time may use it.
    """

    def __init__(self) -> None:
        # Digest, operation, when it was sent last. Of an operation that the history has forgotten it is a reduced copy.
        self._keys: OrderedDict[str, tuple[str, Operation, float]] = OrderedDict()

    def find(self, request: Asked, key: str | None) -> Operation | None:
        """Return the operation that an earlier call under ``key`` got, unless that is to be tried anew. Raises
        IdempotencyKeyError if the earlier call was another request."""
        self._drop()
        if key is None or key not in self._keys:
            return None
        digest, operation, _ = self._keys[key]
        if digest != request.digest():
            raise reused(f"{operation.request.operation} {operation.id}", key)
        self._note(key, digest, operation)
        return operation if operation.answers_repeats else None

    def add(self, key: str | None, request: Asked, operation: Operation) -> None:
        if key is not None:
            self._note(key, request.digest(), operation)

    def forgotten(self, operation: Operation) -> None:
        """Keep no more of an operation than repeats need."""
        kept = operation.as_forgotten()
        for key, (digest, each, sent_at) in self._keys.items():
            if each is operation:
                self._keys[key] = digest, kept, sent_at

    def _note(self, key: str, digest: str, operation: Operation) -> None:
        self._keys[key] = digest, operation, clock.monotonic()
        self._keys.move_to_end(key)

    def _drop(self) -> None:
        oldest = clock.monotonic() - KEPT_S
        while self._keys and (len(self._keys) > MAX_KEPT or next(iter(self._keys.values()))[2] < oldest):
            self._keys.popitem(last=False)
