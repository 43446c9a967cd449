"""Connections between ranks on several hosts."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import pytest

from memsaver_core.contract.errors import ConfigurationError, MemsaverError
from memsaver_core.ranks import remote
from memsaver_core.ranks.connection import SocketChannel, serve
from tests.waiting import wait_until

KEY = b"a key of the engine"


def answer(message: dict[str, int]) -> dict[str, int]:
    return {**message, "answered": 1}


def port_of(listener: remote.RemoteListener) -> int:
    return int(listener.path.rpartition(":")[2])


@contextmanager
def through(listener: remote.RemoteListener) -> Iterator[tuple[str, list[bytes], list[int]]]:
    """A path at which somebody between two hosts forwards to ``listener`` what a rank sends. Yields the path, what the
    service has sent, and numbers of the service's bytes to alter."""
    heard: list[bytes] = []
    alter: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as between:

        def forward(source: socket.socket, to: socket.socket, changing: bool) -> None:
            with suppress(OSError):  # either side may end the connection
                while content := source.recv(1 << 16):
                    if changing:
                        heard.append(content)
                        changed = bytearray(content)
                        for each in alter:
                            changed[each] ^= 1
                        content = bytes(changed)
                    to.sendall(content)
                to.shutdown(socket.SHUT_RDWR)

        def run() -> None:
            rank, _ = between.accept()
            service = socket.create_connection(("127.0.0.1", port_of(listener)))
            threading.Thread(target=forward, args=(rank, service, False), daemon=True).start()
            forward(service, rank, True)

        threading.Thread(target=run, daemon=True).start()
        yield f"{remote.SCHEME}127.0.0.1:{between.getsockname()[1]}", heard, alter


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_ranks_answer_in_order(host: str) -> None:
    listener = remote.RemoteListener(3, host, KEY)
    ranks = [threading.Thread(target=serve, args=(listener.path, rank, answer, 0, KEY)) for rank in (2, 0, 1)]
    for rank in ranks:
        rank.start()
    channel = SocketChannel(None, listener.accept(600))
    for number in range(3):
        assert channel.start({"number": number}).result(600) == [{"number": number, "answered": 1}] * 3
    channel.close()
    for rank in ranks:
        rank.join()


def test_who_does_not_know_the_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it sends, or if it sends nothing; the rank that knows the key is let in after it."""
    monkeypatch.setattr(remote, "PROOF_S", 0.2)
    listener = remote.RemoteListener(1, "127.0.0.1", KEY)

    def refused() -> list[str]:
        return [each.getMessage() for each in caplog.records if "refused a connection" in each.getMessage()]

    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(listener.accept, 600)
        with pytest.raises((ConfigurationError, OSError)):
            remote.connect(listener.path, 0, b"another key")
        with pytest.raises((ConfigurationError, OSError)):
            remote.connect(listener.path, 7, KEY)  # there is no such rank
        silent = socket.create_connection(("127.0.0.1", port_of(listener)))
        for content in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096):
            with socket.create_connection(("127.0.0.1", port_of(listener))) as stranger:
                stranger.sendall(content)
        wait_until(lambda: len(refused()) == 5)
        monkeypatch.setattr(remote, "PROOF_S", 600)
        with closing(remote.connect(listener.path, 0, KEY)):
            (connection,) = accepted.result()
            connection.close()
        silent.close()
    assert "another key" in refused()[0]
    assert not any(KEY.decode() in each for each in refused())


def test_a_service_that_does_not_know_the_key_gets_no_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as false:

        def pretend() -> None:
            rank, _ = false.accept()
            rank.sendall(bytes(32))
            rank.recv(1 << 16)
            rank.sendall(bytes(32))

        threading.Thread(target=pretend, daemon=True).start()
        with pytest.raises(ConfigurationError, match="another key"):
            remote.connect(f"{remote.SCHEME}127.0.0.1:{false.getsockname()[1]}", 0, KEY)


@pytest.mark.parametrize("byte", [0, 3, 20, 40])
def test_a_message_that_was_altered_is_not_carried_out(byte: int) -> None:
    """Be it in its length, its code or its content."""
    listener = remote.RemoteListener(1, "127.0.0.1", KEY)
    with ThreadPoolExecutor(1) as pool, through(listener) as (path, _, alter):
        accepted = pool.submit(listener.accept, 600)
        with closing(remote.connect(path, 0, KEY)) as rank:
            (service,) = accepted.result()
            service.sendall(b"first\n")
            assert rank.readline() == "first\n"
            alter.append(byte)
            service.sendall(b"second\n")
            service.close()
            with pytest.raises(ConnectionError):
                rank.readline()


def test_a_message_that_is_repeated_is_not_carried_out() -> None:
    listener = remote.RemoteListener(1, "127.0.0.1", KEY)
    with ThreadPoolExecutor(1) as pool, through(listener) as (path, heard, _):
        accepted = pool.submit(listener.accept, 600)
        with closing(remote.connect(path, 0, KEY)) as rank:
            (service,) = accepted.result()
            service.sendall(b"release\n")
            assert rank.readline() == "release\n"
            service._connection.sendall(heard[-1][-len(b"release\n") - 36 :])
            with pytest.raises(ConnectionError, match="altered"):
                rank.readline()
            service.close()


def test_no_more_is_read_than_a_message_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = remote.RemoteListener(1, "127.0.0.1", KEY)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, 600)
        with closing(remote.connect(listener.path, 0, KEY)) as rank:
            (service,) = accepted.result()
            service._connection.sendall(struct.pack("!I32s", (64 << 20) + 1, bytes(32)))
            with pytest.raises(ConnectionError, match="too long"):
                rank.readline()
            monkeypatch.setattr(remote, "LONGEST", 8)
            with pytest.raises(ConnectionError, match="too long"):
                service.sendall(b"a message\n")
            service.close()


def test_a_rank_that_does_not_connect_is_named() -> None:
    listener = remote.RemoteListener(2, "127.0.0.1", KEY)
    with ThreadPoolExecutor(1) as pool:
        rank = pool.submit(remote.connect, listener.path, 0, KEY)
        with pytest.raises(MemsaverError, match=r"^rank 1 did not connect in 0.3 s"):
            listener.accept(0.3)
        with closing(rank.result()):
            pass


def test_a_host_that_is_not_this_one() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be awaited at 192\.0\.2\.1"):
        remote.RemoteListener(1, "192.0.2.1", KEY)


def test_the_end_of_a_rank_on_another_host_is_reported() -> None:
    """No process of it can be watched here."""
    ended: queue.Queue[int] = queue.Queue()
    listener = remote.RemoteListener(2, "127.0.0.1", KEY)
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(remote.connect, listener.path, rank, KEY) for rank in range(2)]
        channel = SocketChannel(None, listener.accept(600))
        channel.watch([0, 1], ended.put)
        ranks[1].result().close()
        assert ended.get(timeout=600) == 1
        ranks[0].result().close()
        assert ended.get(timeout=600) == 0
        channel.close()
