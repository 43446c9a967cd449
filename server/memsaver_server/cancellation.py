"""Cancels an operation as long as it has not begun to unmap or map memory."""

from __future__ import annotations

import threading
from typing import Any

from memsaver_core import MemsaverError


class OperationCancelledError(MemsaverError):
    """The operation ``name`` was cancelled by the caller ``by``. Nothing was unmapped or mapped."""

    kind = "cancelled"
    status = 409

    def __init__(self, name: str, by: str) -> None:
        self.by = by
        super().__init__(f"{name} was cancelled by {by}; memory and admission are as before. Repeat the call if needed")

    def details(self) -> dict[str, Any]:
        return {"cancelled_by": self.by}


class Cancellation:
    """Whether an operation may be cancelled still, and who cancelled it. Every method may be called from any thread."""

    def __init__(self, name: str) -> None:
        """``name`` is the operation's, for messages."""
        self.name = name
        self._changed = threading.Condition()
        self._by: str | None = None
        self._moving = False

    @property
    def requested(self) -> bool:
        """Whether a caller has cancelled it; if that was too late, it ends otherwise all the same."""
        return self._by is not None

    @property
    def cancelled_by(self) -> str | None:
        """Who has cancelled it."""
        return self._by

    def request(self, by: str) -> bool:
        """Cancel on behalf of ``by``; returns False if memory is being moved already."""
        with self._changed:
            if self._by is None:
                self._by = by
                self._changed.notify_all()
            return not self._moving

    def check(self) -> None:
        """Raise OperationCancelledError if it was cancelled."""
        if self._by is not None:
            raise OperationCancelledError(self.name, self._by)

    def begin_moving(self) -> None:
        """Memory is unmapped or mapped from now on, which is not interrupted.

        Raises:
            OperationCancelledError: it was cancelled before.
        """
        with self._changed:
            self.check()
            self._moving = True

    def move_later(self) -> None:
        """Nothing was moved, as memory is short: it may be cancelled again.

        Raises:
            OperationCancelledError: it was cancelled meanwhile.
        """
        with self._changed:
            self._moving = False
            self.check()
