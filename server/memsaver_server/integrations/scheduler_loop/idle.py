"""The rest of a scheduler's thread that has nothing to do.

Its event loop never sleeps. Beside it each step of another thread of the process waits up to 5 ms for the interpreter's
lock, Python's switch interval.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

#: How long a rest lasts without a message: after it the engine does what it does while it is idle, milliseconds.
REST_MS = 1000


class IdleRest:
    """Rests the thread that receives requests, until a message or a call of ``wake``.

    Attributes:
        poller: waits for both; None if the scheduler does not receive from sockets of ZeroMQ.
    """

    def __init__(self, sockets: Sequence[Any], nothing_to_do: Callable[[], bool], iterations: int) -> None:
        """
        Args:
            sockets: those that the scheduler receives from; None in the place of one is left out.
            nothing_to_do: whether an iteration of the event loop would do nothing; called in the scheduler's thread.
            iterations: how many of them the scheduler needs to settle after the last work.
        """
        self._nothing_to_do = nothing_to_do
        self._settling = iterations
        self._idle = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poller: Any = None
        with suppress(ImportError):
            zmq = importlib.import_module("zmq")
            if isinstance(sockets[0], zmq.Socket):
                self.poller = zmq.Poller()
                self.poller.register(self._wake, zmq.POLLIN)
                for socket in sockets:
                    if socket is not None:
                        self.poller.register(socket, zmq.POLLIN)

    def wake(self) -> None:
        """End the rest, or keep the next one from beginning. From any thread."""
        os.eventfd_write(self._wake, 1)

    def rest(self) -> None:
        """Return once there may be something to do. In the scheduler's thread, before it receives."""
        self._idle = self._idle + 1 if self._nothing_to_do() else 0
        if self.poller is not None and self._idle > self._settling:
            self.poller.poll(REST_MS)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
