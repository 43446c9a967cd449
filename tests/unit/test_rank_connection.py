"""The connections between ranks that have no channel of their own."""

from __future__ import annotations

import os
import socket
import stat
import threading

import pytest

from memsaver_core.contract.errors import MemsaverError
from memsaver_core.ranks.connection import SocketChannel, serve
from memsaver_core.rendezvous import Listener


def test_answers_come_in_the_order_of_the_ranks() -> None:
    """Whatever the order in which they connected; rank 0 answers in this process."""
    listener = Listener(4)
    assert stat.S_IMODE(os.stat(listener.path).st_mode) == 0o600
    ranks = [
        threading.Thread(target=serve, args=(listener.path, rank, lambda message, rank=rank: {**message, "rank": rank}))
        for rank in (3, 1, 2)
    ]
    for rank in ranks:
        rank.start()
    channel = SocketChannel(lambda message: {**message, "rank": 0}, listener.accept(600))
    assert not os.path.exists(os.path.dirname(listener.path))
    for number in range(3):
        told = channel.start({"number": number}).result(600)
        assert told == [{"number": number, "rank": rank} for rank in range(4)]
    channel.close()
    for rank in ranks:
        rank.join()


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_rank_that_does_not_connect_is_named() -> None:
    listener = Listener(3)
    rank = threading.Thread(target=serve, args=(listener.path, 1, lambda message: message))
    rank.start()
    with pytest.raises(MemsaverError, match=r"^rank 2 did not connect in 0.3 s"):
        listener.accept(0.3)
    assert not os.path.exists(listener.path)
    rank.join()


def test_a_rank_that_closes_its_connection_is_named() -> None:
    listener = Listener(2)
    with socket.socket(socket.AF_UNIX) as rank:
        rank.connect(listener.path)
        rank.sendall(b"1\n")
        channel = SocketChannel(lambda message: message, listener.accept(600))
    with pytest.raises(ConnectionError, match="rank 1 has closed its connection"):
        channel.start({}).result(600)
    channel.close()
