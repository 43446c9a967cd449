"""The lease of a prepared operation: it stays prepared until it is committed, is cancelled, or the lease ends."""

from __future__ import annotations

import time
from concurrent.futures import Future

from memsaver_server.cancellation import Cancellation

#: Who cancels an operation whose lease has ended.
LEASE_END = "the end of its lease"
#: How long an operation stays prepared if its caller does not say, seconds.
DEFAULT_LEASE_S = 30.0


class Lease(Cancellation):
    """The cancellation of an operation that is prepared first. Every method may be called from any thread.

    Attributes:
        reached: done once the operation is prepared, or has ended before.
    """

    def __init__(self, name: str, seconds: float) -> None:
        """``seconds`` count from the moment at which the operation is prepared."""
        super().__init__(name)
        self.reached: Future[None] = Future()
        self.reached.set_running_or_notify_cancel()
        self._seconds = seconds
        self._ends: float | None = None  # on the monotonic clock
        self._committed = False

    @property
    def prepared(self) -> bool:
        """Whether it waits for its commit now."""
        waits = self._ends is not None and self.seconds_left() > 0
        return waits and not self._committed and not self.requested

    @property
    def committed(self) -> bool:
        return self._committed

    def seconds_left(self) -> float:
        """Seconds until the lease ends; those of the whole lease before the operation is prepared."""
        return self._seconds if self._ends is None else max(0.0, self._ends - time.monotonic())

    def renew(self, seconds: float) -> bool:
        """Let the lease end no earlier than ``seconds`` from now; returns False if it is over, or was committed."""
        with self._changed:
            if self._ends is None:
                self._seconds = max(self._seconds, seconds)
                return not self.requested
            if self.prepared:
                self._ends = max(self._ends, time.monotonic() + seconds)
            return self.prepared

    def commit(self) -> bool:
        """Let the operation go on; it is not interrupted from now on. Idempotent.

        Returns:
            False if it is not prepared: not yet, or no longer.
        """
        with self._changed:
            if self.prepared:
                self._committed = self._moving = True
                self._changed.notify_all()
            return self._committed

    def begin(self) -> None:
        """The operation is prepared.

        Raises:
            OperationCancelledError: it was cancelled before.
        """
        with self._changed:
            self.check()
            self._ends = time.monotonic() + self._seconds

    def wait_for_commit(self) -> None:
        """Block until the commit.

        Raises:
            OperationCancelledError: it was cancelled, or the lease has ended.
        """
        with self._changed:
            while self.prepared:
                self._changed.wait(self.seconds_left())
            if not self._committed:
                self._by = self._by or LEASE_END
                self.check()

    def tell(self) -> None:
        """Tell those who wait for ``reached``. Idempotent; only the operation's worker calls it."""
        if not self.reached.done():
            self.reached.set_result(None)
