"""Connections between the ranks of an engine that has no channel for messages: Unix sockets, a line of JSON each.

Rank 0 is the service's process. The other ranks connect to it and answer until it closes the connection.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from memsaver_core.contract.errors import MemsaverError
from memsaver_core.ranks.protocol import Plain

_T = TypeVar("_T")

#: How a rank answers a message; does not raise.
AnswerMessage = Callable[[Plain], Plain]


class Listener:
    """Takes the connections of ranks ``1`` to ``ranks - 1``, at a socket that only this user can reach.

    Attributes:
        path: of the socket, to be given to the ranks.
    """

    def __init__(self, ranks: int, first: int = 1) -> None:
        self._expected = range(first, ranks)
        self._folder = tempfile.mkdtemp(prefix="memsaver-ranks-")  # mode 0700
        self.path = str(Path(self._folder) / "socket")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        os.chmod(self.path, 0o600)
        self._socket.listen(ranks)

    def accept(self, timeout_s: float) -> list[socket.socket]:
        """Return the connections in the order of the ranks, once all are there; removes the socket.

        Raises:
            MemsaverError: some rank did not connect in time.
        """
        deadline = time.monotonic() + timeout_s
        connections: dict[int, socket.socket] = {}
        try:
            while missing := [rank for rank in self._expected if rank not in connections]:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    connection, _ = self._socket.accept()
                    connection.settimeout(max(0.001, deadline - time.monotonic()))
                    with connection.makefile("r") as said:
                        number = said.readline()
                    if not number.endswith("\n"):
                        raise MemsaverError("a rank closed its connection before it said its number; see its log")
                    connections[int(number)] = connection
                except TimeoutError:
                    for connection in connections.values():
                        connection.close()
                    named = ", ".join(map(str, missing))
                    raise MemsaverError(f"rank {named} did not connect in {timeout_s:g} s; see its log") from None
        finally:
            self._socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
        for connection in connections.values():
            connection.settimeout(None)
        return [connections[rank] for rank in self._expected]


class SocketChannel:
    """Reaches the ranks by ``connections``, in order; ``answer`` is that of rank 0, in this process.

    Args:
        answer: None if the first of ``connections`` is rank 0.
    """

    def __init__(self, answer: AnswerMessage | None, connections: Iterable[socket.socket]) -> None:
        self._answer = answer
        self._first = 0 if answer is None else 1
        self._connections = [(connection, connection.makefile("r")) for connection in connections]
        self._lock = threading.Lock()

    def start(self, message: Plain) -> Future[list[Plain]]:
        return started(lambda: self._ask(message))

    def send(self, message: Plain) -> None:
        """Send a message that is not answered to the other ranks, after all that was sent before.

        Raises:
            OSError: a rank has closed its connection.
        """
        with self._lock:
            self._send(message)

    def close(self) -> None:
        """End the ranks' loops."""
        for connection, replies in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # ends a read in another thread
            connection.close()
            replies.close()

    def _ask(self, message: Plain) -> list[Plain]:
        with self._lock:
            self._send(message)
            answers = [] if self._answer is None else [self._answer(message)]
            for rank, (_, replies) in enumerate(self._connections, self._first):
                with _open(rank):
                    answers.append(json.loads(replies.readline()))
            return answers

    def _send(self, message: Plain) -> None:
        line = json.dumps(message).encode() + b"\n"
        for rank, (connection, _) in enumerate(self._connections, self._first):
            with _open(rank):
                connection.sendall(line)


def serve(path: str, rank: int, answer: Callable[[Plain], Plain | None]) -> None:
    """Connect to the service at ``path`` as ``rank``, and answer messages until it ends; None is no answer.

    Raises:
        OSError: the service cannot be reached.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(f"{rank}\n".encode())
        with connection.makefile("r") as messages:
            for line in messages:
                if (reply := answer(json.loads(line))) is not None:
                    connection.sendall(json.dumps(reply).encode() + b"\n")


def started(call: Callable[[], _T]) -> Future[_T]:
    """Run ``call`` in a new thread; one that hangs does not keep the process from ending."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="memsaver-ranks", daemon=True).start()
    return future


@contextmanager
def _open(rank: int) -> Iterator[None]:
    try:
        yield
    except (OSError, json.JSONDecodeError) as error:
        raise ConnectionError(f"rank {rank} has closed its connection") from error
