"""Buffers that the ranks of a group read from each other: one of each rank, mapped by all of them. An engine's own
all-reduce uses them in place of CUDA IPC: they can be released, and the process can then be checkpointed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from memsaver_core.contract.errors import MemsaverError
from memsaver_core.rendezvous import Listener, connect
from memsaver_core.shared_buffers import ImportedBuffer, SharedBuffer

#: How long a rank waits for another one, seconds.
TIMEOUT_S = 30.0

#: Gathers one value of each rank, in their order.
Gather = Callable[[Any], list[Any]]


class PeerSockets:
    """A connection to each other rank of a group, for file descriptors. All ranks make it at the same time."""

    def __init__(self, rank: int, gather: Gather) -> None:
        """Connect to the others, on this host and of this user; raise MemsaverError if one is not there in time."""
        self.rank = rank
        listener = Listener(first=rank + 1)
        try:
            paths = gather(listener.path)
            listener.ranks = len(paths)
            lower = [connect(path, rank) for path in paths[:rank]]
            higher = listener.accept(TIMEOUT_S)
        except OSError as error:
            raise MemsaverError(f"rank {rank} cannot reach the other ranks of its group: {error}") from error
        finally:
            listener.close()
        others = (number for number in range(len(paths)) if number != rank)
        self._peers = dict(zip(others, [*lower, *higher], strict=True))
        for peer in self._peers.values():
            peer.settimeout(TIMEOUT_S)

    @property
    def ranks(self) -> int:
        return len(self._peers) + 1

    def exchange(self, descriptor: int) -> Mapping[int, int]:
        """Send a file descriptor to each other rank; return theirs by rank, which the caller closes. Raises
        MemsaverError, with the rank, if one did not send its own within ``TIMEOUT_S``; no later exchange succeeds."""
        received: dict[int, int] = {}
        asked = self.rank
        try:
            for asked, peer in self._peers.items():  # noqa: B007  # named in the error
                socket.send_fds(peer, [b"\0"], [descriptor])
            for asked, peer in self._peers.items():
                received[asked] = _receive(peer)
        except OSError as error:
            for each in received.values():
                os.close(each)
            for peer in self._peers.values():
                peer.close()  # else the next exchange could receive a descriptor of this one
            raise MemsaverError(
                f"rank {self.rank} of a group did not get the memory of rank {asked}: {error}; restart the engine"
            ) from error
        return received


class PeerBuffers:
    """A buffer of this rank, on torch's device ``device_index``, and the buffers of the other ranks of its group, which
    ``sockets`` reach. ``suspended``: the memory is given back."""

    def __init__(self, nbytes: int, device_index: int, sockets: PeerSockets) -> None:
        """Make a buffer of zeros and map those of the others. All ranks do so at the same time, in the same order.
        Raises MemsaverError as ``SharedBuffer``, ``ImportedBuffer`` and ``PeerSockets.exchange`` do."""
        self.sockets = sockets
        self.device_index = device_index
        self.suspended = False
        self._own = SharedBuffer(device_index, nbytes)
        self._others: dict[int, ImportedBuffer] = {}
        self._map_others()

    @property
    def nbytes(self) -> int:
        return self._own.nbytes

    @property
    def addresses(self) -> list[int]:
        """The address of each rank's buffer in this process, in the order of the ranks. They never change."""
        others = {rank: each.address for rank, each in self._others.items()}
        return [address for _, address in sorted({**others, self.sockets.rank: self._own.address}.items())]

    def suspend(self) -> None:
        """Give the memory back; nothing on any rank may use it. Does nothing while suspended."""
        self.suspended = True
        for other in self._others.values():
            other.drop()
        self._own.release()

    def resume(self) -> None:
        """Bring the memory and its content back; returns when every rank has called it."""
        self._own.restore()
        self._map_others()
        self.suspended = False

    def _map_others(self) -> None:
        """Map the buffers of the other ranks: at new addresses, or where they were."""
        exported = self._own.export_fd()
        try:
            received = self.sockets.exchange(exported)
        finally:
            os.close(exported)
        try:
            for rank, descriptor in received.items():
                if (other := self._others.get(rank)) is None:
                    self._others[rank] = ImportedBuffer(descriptor, self.nbytes, self.device_index)
                else:
                    other.drop()
                    other.map_again(descriptor)
        finally:
            for descriptor in received.values():
                os.close(descriptor)


def _receive(peer: socket.socket) -> int:
    _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
    if not descriptors:
        raise ConnectionError("it closed the connection")
    return descriptors[0]
