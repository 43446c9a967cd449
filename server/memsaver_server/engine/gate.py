"""A gate: the engine interface for a program without a scheduler.

Work on device memory runs inside ``with gate.request():``. A release closes the gate, and waits for requests inside.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from memsaver_core.contract.errors import AdmissionClosedError, DrainTimeoutError
from memsaver_core.contract.requests import DrainMode
from memsaver_server import clock
from memsaver_server.engine import never, waits


@dataclass(eq=False)
class InFlightRequest:
    """One request inside the gate.

    Attributes:
        name: its name in the error of a drain that times out.
        aborted: a release with mode ``abort`` waits for this request; it should end early.
    """

    name: str
    aborted: bool = False


class Gate:
    """Implements ``Engine``. Every method may be called from any thread.

    It cannot interrupt a request: mode ``abort`` sets ``InFlightRequest.aborted``, mode ``keep`` is ``wait``.
    """

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self._changed = threading.Condition()
        self._inside: dict[str, InFlightRequest] = {}
        self._closed: str | None = None
        self._hold = 0
        self.held = 0  # how many requests wait for the gate to open
        self._numbers = itertools.count(1)

    @contextmanager
    def request(self, name: str | None = None) -> Iterator[InFlightRequest]:
        """Run the block inside the gate. Waits for the gate to open if the service holds requests.

        Raises:
            AdmissionClosedError: the gate is closed; the message says why.
        """
        request = self._enter(name)
        try:
            yield request
        finally:
            with self._changed:
                del self._inside[request.name]
                self._changed.notify_all()

    def is_alive(self) -> bool:
        """Always true: a gate has no process to look at."""
        return True

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        with self._changed:
            self._closed, self._hold = reason, hold

    def open_admission(self) -> None:
        with self._changed:
            self._closed = None
            self._changed.notify_all()

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        deadline = clock.monotonic() + timeout_s
        with self._changed:
            for request in self._inside.values():
                request.aborted = request.aborted or mode == "abort"
            pauses = waits(deadline, given_up)
            if not any(self._changed.wait_for(lambda: not self._inside, wait_s) for wait_s in pauses):
                raise DrainTimeoutError(timeout_s, list(self._inside))

    def flush_cache(self) -> None:
        """Does nothing: a gate has no cache."""

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> Collection[str] | None:
        """Does nothing. Override it to rebuild the content of ``lost`` tags, and return those rebuilt."""
        return None

    def _enter(self, name: str | None) -> InFlightRequest:
        with self._changed:
            if self._closed is not None:
                if self.held >= self._hold:
                    raise AdmissionClosedError(self._closed)
                self.held += 1
                try:
                    self._changed.wait_for(lambda: self._closed is None)
                finally:
                    self.held -= 1
            number = next(self._numbers)
            request = InFlightRequest(f"{name} #{number}" if name else f"request {number}")
            self._inside[request.name] = request
            return request
