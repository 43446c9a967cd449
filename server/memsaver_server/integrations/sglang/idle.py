"""The rest of a scheduler's thread that has nothing to do.

SGLang's event loop never sleeps. Beside it each step of another thread of the process waits up to 5 ms for the
interpreter's lock, Python's switch interval. ``--sleep-on-idle`` sleeps in a poll that only SGLang's own sockets end.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

#: How long a rest lasts without a message: after it SGLang does what it does while it is idle, milliseconds.
REST_MS = 1000


class IdleRest:
    """Rests the thread that receives requests, until a message or a call of ``wake``."""

    def __init__(self, receiver: Any, nothing_to_do: Callable[[], bool], iterations: int) -> None:
        """
        Args:
            receiver: SGLang's receiver of requests.
            nothing_to_do: whether an iteration of the event loop would do nothing; called in the scheduler's thread.
            iterations: how many of them SGLang needs to settle after the last work.
        """
        self._nothing_to_do = nothing_to_do
        self._settling = iterations
        self._idle = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller: Any = None
        sockets = [getattr(receiver, name, None) for name in ("recv_from_tokenizer", "recv_from_rpc")]
        with suppress(ImportError):
            zmq = importlib.import_module("zmq")
            if isinstance(sockets[0], zmq.Socket):
                self._poller = zmq.Poller()
                self._poller.register(self._wake, zmq.POLLIN)
                for socket in sockets:
                    if socket is not None:
                        self._poller.register(socket, zmq.POLLIN)

    def wake(self) -> None:
        """End the rest, or keep the next one from beginning. From any thread."""
        os.eventfd_write(self._wake, 1)

    def shorten(self, sleeper: Any) -> None:
        """Have SGLang's own sleep of ``--sleep-on-idle`` end as this rest does."""
        if sleeper is not None and self._poller is not None:
            sleeper.poller = self._poller

    def rest(self) -> None:
        """Return once there may be something to do. In the scheduler's thread, before it receives."""
        self._idle = self._idle + 1 if self._nothing_to_do() else 0
        if self._poller is not None and self._idle > self._settling:
            self._poller.poll(REST_MS)
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
