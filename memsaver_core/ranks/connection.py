"""Connections between the ranks of an engine that has no channel for messages: Unix sockets, or TCP between several
hosts, a line of JSON each. The other ranks connect to rank 0, the service's process, and answer until it closes the
connection."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress

from memsaver_core.ranks import remote
from memsaver_core.ranks.protocol import Plain
from memsaver_core.ranks.remote import KeyedConnection
from memsaver_core.rendezvous import connect, started

#: How a rank answers a message; does not raise.
AnswerMessage = Callable[[Plain], Plain]


class SocketChannel:
    """Reaches the ranks by ``connections``, in order; rank 0 by ``answer`` if it is this process, else None."""

    def __init__(self, answer: AnswerMessage | None, connections: Iterable[socket.socket | KeyedConnection]) -> None:
        self._answer = answer
        self._first = 0 if answer is None else 1
        self._connections = [(connection, connection.makefile("r")) for connection in connections]
        self._lock = threading.Lock()

    def start(self, message: Plain) -> Future[list[Plain]]:
        return started(lambda: self._ask(message))

    def send(self, message: Plain) -> None:
        """Send a message that is not answered to the other ranks; raise OSError if one has closed its connection."""
        with self._lock:
            self._send(message)

    def watch(self, ranks: Iterable[int], on_end: Callable[[int], object]) -> None:
        """Have ``on_end(rank)`` called, from a separate thread, for each of ``ranks`` that closes its connection."""
        watched = {self._connections[rank - self._first][0].fileno(): rank for rank in ranks}
        poll = select.poll()
        for each in watched:
            poll.register(each, select.POLLRDHUP)

        def run() -> None:
            while watched:
                for file, _ in poll.poll():
                    poll.unregister(file)
                    on_end(watched.pop(file))

        threading.Thread(target=run, name="memsaver-hosts", daemon=True).start()

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


def serve(path: str, rank: int, answer: Callable[[Plain], Plain | None], wait_s: float = 0, key: bytes = b"") -> None:
    """Connect to the service at ``path`` as ``rank``, and answer messages until it ends; None is not sent. Raises
    OSError if the service cannot be reached. A local connection uses ``wait_s``, a remote one ``key``."""
    connected = remote.connect(path, rank, key) if path.startswith(remote.SCHEME) else connect(path, rank, wait_s)
    with closing(connected), closing(connected.makefile("r")) as messages:
        for line in messages:
            if (reply := answer(json.loads(line))) is not None:
                connected.sendall(json.dumps(reply).encode() + b"\n")


@contextmanager
def _open(rank: int) -> Iterator[None]:
    try:
        yield
    except (OSError, json.JSONDecodeError) as error:
        raise ConnectionError(f"rank {rank} has closed its connection") from error
