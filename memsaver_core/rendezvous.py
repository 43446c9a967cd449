"""How the ranks of an engine reach each other: Unix sockets between their processes, and futures of blocking calls."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from memsaver_core.contract.errors import MemsaverError

_T = TypeVar("_T")


#: What the names of listeners' folders begin with.
FOLDER = "memsaver-ranks-"
#: How often a rank tries to connect to a listener that is not there yet, seconds.
RETRY_S = 0.05


def path_in(folder: str) -> str:
    """Return the path of the socket of the listener with ``folder``."""
    return str(Path(folder) / "socket")


class Listener:
    """Takes the connections of ranks ``first`` to ``ranks - 1``, at a socket that only this user can reach. Give
    its ``path`` to the ranks; ``ranks`` may be assigned until ``accept`` is called."""

    def __init__(self, ranks: int = 0, first: int = 1, folder: str = "") -> None:
        """``folder`` is made, and must not exist; without it, one with a new name is made."""
        self.ranks = ranks
        self._first = first
        if folder:
            os.mkdir(folder, mode=0o700)
        self._folder = folder or tempfile.mkdtemp(prefix=FOLDER)  # mode 0700
        self.path = path_in(self._folder)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        os.chmod(self.path, 0o600)
        self._socket.listen()

    def accept(self, timeout_s: float) -> list[Any]:
        """Return the connections in the order of the ranks, once all are there; removes the socket. Raises
        MemsaverError if some rank did not connect in time."""
        deadline = time.monotonic() + timeout_s
        connections: dict[int, Any] = {}
        expected = range(self._first, self.ranks)
        try:
            while missing := [rank for rank in expected if rank not in connections]:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                connection, peer = self._socket.accept()
                connections |= self._known(connection, peer, missing, deadline)
        except TimeoutError:
            for connection in connections.values():
                connection.close()
            late = ", ".join(map(str, missing))
            raise MemsaverError(f"rank {late} did not connect in {timeout_s:g} s; see its log") from None
        finally:
            self.close()
        return [connections[rank] for rank in expected]

    def _known(self, connection: socket.socket, peer: Any, missing: Collection[int], deadline: float) -> dict[int, Any]:
        """Return ``connection`` by its rank, one of those ``missing``; nothing if it is refused."""
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        # Unbuffered: what follows the number is for the user of the connection.
        with connection.makefile("rb", buffering=0) as said:
            number = said.readline()
        if not number.endswith(b"\n"):
            raise MemsaverError("a rank closed its connection before it sent its rank number; see its log")
        connection.settimeout(None)
        return {int(number): connection}

    def close(self) -> None:
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def connect(path: str, rank: int, wait_s: float = 0) -> socket.socket:
    """Return a connection of ``rank`` to the ``Listener`` at ``path``, which is there after ``wait_s`` seconds at the
    latest; raise OSError if it cannot be reached."""
    deadline = time.monotonic() + wait_s
    connection = socket.socket(socket.AF_UNIX)
    try:
        while (error := connection.connect_ex(path)) in (errno.ENOENT, errno.ECONNREFUSED):
            if time.monotonic() > deadline:
                break
            time.sleep(RETRY_S)
        if error:
            raise OSError(error, os.strerror(error), path)
        connection.sendall(f"{rank}\n".encode())
    except OSError:
        connection.close()
        raise
    return connection


def started(call: Callable[[], _T], name: str = "memsaver-ranks") -> Future[_T]:
    """Run ``call`` in a new thread; one that hangs does not keep the process from ending."""
    future: Future[_T] = Future()
    threading.Thread(target=settle, args=(future, call), name=name, daemon=True).start()
    return future


def settle(future: Future[_T], call: Callable[[], _T]) -> None:
    """Set ``future`` to what ``call`` returns or raises."""
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
