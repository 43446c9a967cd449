"""A gate: the engine port for a program that has no scheduler of its own to ask.

Work that touches device memory runs inside ``with gate.request():``. While memory is away the gate is closed, and a
release waits until everybody inside has come out.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memsaver_server.engine import AdmissionClosedError, DrainMode, DrainTimeoutError

if TYPE_CHECKING:
    from memsaver_server.engine import Engine


class Turn:
    """One request inside the gate.

    Attributes:
        name: how a drain that takes too long names it.
        aborted: a release with mode ``abort`` waits for this request: end soon, with what there is.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.aborted = False


class Gate:
    """Implements ``Engine``. Every method may be called from any thread.

    It cannot stop a request in the middle: mode ``abort`` sets ``Turn.aborted``, mode ``keep`` waits as ``wait`` does.
    """

    def __init__(self, name: str = "engine") -> None:
        self.name = name
        self._changed = threading.Condition()
        self._inside: dict[str, Turn] = {}
        self._closed: str | None = None
        self._hold = 0
        self._held = 0
        self._numbers = itertools.count(1)

    @property
    def held(self) -> int:
        """How many requests wait for the gate to open."""
        return self._held

    @contextmanager
    def request(self, name: str | None = None) -> Iterator[Turn]:
        """Be inside the gate for the length of the block. Where the service holds requests, wait until it opens.

        Raises:
            AdmissionClosedError: the gate is closed; the message says why.
        """
        turn = self._enter(name)
        try:
            yield turn
        finally:
            with self._changed:
                del self._inside[turn.name]
                self._changed.notify_all()

    def is_alive(self) -> bool:
        """A gate does not know: yes."""
        return True

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        with self._changed:
            self._closed, self._hold = reason, hold

    def open_admission(self) -> None:
        with self._changed:
            self._closed = None
            self._changed.notify_all()

    def drain(self, timeout_s: float, mode: DrainMode = "wait") -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._inside:
                for turn in self._inside.values():
                    turn.aborted = turn.aborted or mode == "abort"
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise DrainTimeoutError(timeout_s, list(self._inside))

    def flush_cache(self) -> None:
        """A gate caches nothing."""

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """A gate keeps nothing in device memory. Override it to rebuild what ``lost`` tags held."""

    def _enter(self, name: str | None) -> Turn:
        with self._changed:
            if self._closed is not None:
                if self._held >= self._hold:
                    raise AdmissionClosedError(self._closed)
                self._held += 1
                try:
                    self._changed.wait_for(lambda: self._closed is None)
                finally:
                    self._held -= 1
            number = next(self._numbers)
            turn = Turn(f"{name} #{number}" if name else f"request {number}")
            self._inside[turn.name] = turn
            return turn


if TYPE_CHECKING:
    _is_an_engine: Engine = Gate()
