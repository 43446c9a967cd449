"""Connections between ranks on several hosts: TCP, on which both sides prove first that they know the key. Each message
then carries a code that only they can compute, of its content, direction and number: a message that is forged, altered,
repeated, missing or out of order is noticed. The content is not encrypted."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import time
from collections.abc import Collection, Iterator
from typing import Any

from memsaver_core.contract.errors import ConfigurationError
from memsaver_core.rendezvous import Listener

logger = logging.getLogger("memsaver")

#: The scheme of a listener's address.
SCHEME = "tcp://"
#: The longest message that is read, bytes. Before the other side has proved its key, only that proof is read.
LONGEST = 64 << 20
#: How long the other side may take to prove that it knows the key, seconds.
PROOF_S = 5.0

_NONCE = 32
_CODE = 32
_RANK = struct.Struct("!I")
_PROOF = struct.Struct(f"!{_NONCE}s{_RANK.size}s{_CODE}s")
_HEAD = struct.Struct(f"!I{_CODE}s")


class RemoteListener(Listener):
    """Takes the connections of all ``ranks`` from other hosts, and from this one, at a free port of ``host``, which is
    this host. Raises ConfigurationError if it cannot listen there."""

    def __init__(self, ranks: int, host: str, key: bytes) -> None:
        self.ranks, self._first, self._key = ranks, 0, key
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(address[:2], family=family)
        except OSError as error:
            raise ConfigurationError(f"the ranks of other hosts cannot be awaited at {host}: {error}") from None
        name, port = self._socket.getsockname()[:2]
        self.path = f"{SCHEME}[{name}]:{port}"

    def close(self) -> None:
        self._socket.close()

    def _known(self, connection: socket.socket, peer: Any, missing: Collection[int], deadline: float) -> dict[int, Any]:
        try:
            rank, keyed = _accepted(connection, self._key, missing)
        except (OSError, ConfigurationError) as error:
            connection.close()
            logger.warning("refused a connection from %s to the engine's ranks: %s", peer[0], error)
            return {}
        return {rank: keyed}


class KeyedConnection:
    """A socket over which lines are sent and read. It must not be used after an error."""

    def __init__(self, connection: socket.socket, session: bytes, sends: bytes, reads: bytes) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that goes down closes no connection: this one then ends after half a minute.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = connection
        self.fileno, self.shutdown, self.close = connection.fileno, connection.shutdown, connection.close
        self._session = session
        self._sends, self._reads = sends, reads
        self._sent = self._read = 0

    def sendall(self, line: bytes) -> None:
        if len(line) > LONGEST:
            raise ConnectionError(f"a message of {len(line)} bytes is too long for another host")
        code = self._code(self._sends, self._sent, line)
        self._sent += 1
        self._connection.sendall(_HEAD.pack(len(line), code) + line)

    def readline(self) -> str:
        """Return the next line; an empty string once the other side has closed the connection. Raises ConnectionError
        if it was cut off or altered."""
        if not self._connection.recv(1, socket.MSG_PEEK):
            return ""
        size, code = _HEAD.unpack(_exactly(self._connection, _HEAD.size))
        if size > LONGEST:
            raise ConnectionError(f"a message of {size} bytes is too long")
        line = _exactly(self._connection, size)
        if not hmac.compare_digest(code, self._code(self._reads, self._read, line)):
            raise ConnectionError("a message from another host was altered")
        self._read += 1
        return line.decode()

    def makefile(self, _mode: str) -> KeyedConnection:
        return self

    def __iter__(self) -> Iterator[str]:
        return iter(self.readline, "")

    def _code(self, direction: bytes, number: int, line: bytes) -> bytes:
        return _code(self._session, direction, struct.pack("!Q", number), line)


def connect(path: str, rank: int, key: bytes) -> KeyedConnection:
    """Return a connection of ``rank`` to the ``RemoteListener`` at ``path``. Raises OSError if it cannot be reached, or
    ConfigurationError if it has another key."""
    host, _, port = path.removeprefix(SCHEME).rpartition(":")
    connection = socket.create_connection((host.strip("[]"), int(port)), PROOF_S)
    try:
        theirs, ours, number = _exactly(connection, _NONCE), secrets.token_bytes(_NONCE), _RANK.pack(rank)
        said = (theirs, ours, number)
        connection.sendall(_PROOF.pack(ours, number, _code(key, b"rank", *said)))
        if not hmac.compare_digest(_exactly(connection, _CODE), _code(key, b"service", *said)):
            raise ConfigurationError("the service of the engine's ranks has another key")
        return KeyedConnection(connection, _code(key, b"session", *said), b"up", b"down")
    except BaseException:
        connection.close()
        raise


def _accepted(connection: socket.socket, key: bytes, missing: Collection[int]) -> tuple[int, KeyedConnection]:
    """Return the rank at the other end, one of those ``missing``; the counterpart of ``connect``."""
    connection.settimeout(PROOF_S)
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(ours)
    theirs, number, proof = _PROOF.unpack(_exactly(connection, _PROOF.size, time.monotonic() + PROOF_S))
    said = (ours, theirs, number)
    if not hmac.compare_digest(proof, _code(key, b"rank", *said)):
        raise ConfigurationError("it has another key")
    (rank,) = _RANK.unpack(number)
    if rank not in missing:
        raise ConfigurationError(f"it says that it is rank {rank}, which is not awaited")
    connection.sendall(_code(key, b"service", *said))
    return rank, KeyedConnection(connection, _code(key, b"session", *said), b"down", b"up")


def _code(key: bytes, *parts: bytes) -> bytes:
    """Return the code of ``parts``, of which only the last may vary in length."""
    return hmac.digest(key, b"memsaver ranks 1 " + b"".join(parts), "sha256")


def _exactly(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Read ``size`` bytes; raise ConnectionError if the connection ends before, TimeoutError after ``deadline``."""
    content = bytearray()
    while len(content) < size:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        if not (part := connection.recv(min(size - len(content), 1 << 20))):
            raise ConnectionError("the other side closed the connection")
        content += part
    return bytes(content)
