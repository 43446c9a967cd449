"""Device memory that the processes of one engine share, and that can go away and come back at the same addresses.

Memory of CUDA IPC handles cannot be released, and a process that has used one cannot be checkpointed. These buffers are
virtual memory: a process makes one and hands a file descriptor of it to the others, for example by ``socket.send_fds``;
each maps it at its own address, which never changes. Before a hibernation every process drops what it imported, then
each owner releases its buffers; afterwards each owner restores and exports anew, then the others map again.

``PeerBuffers`` are one buffer of each rank of a group, each mapped by all ranks: an engine's own all-reduce uses them
in place of CUDA IPC.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from memsaver_core import _native, process
from memsaver_core.contract.errors import MemsaverError
from memsaver_core.rendezvous import Listener, connect

#: How long a rank waits for another one, seconds.
TIMEOUT_S = 30.0

#: Gathers one value of each rank, in their order.
Gather = Callable[[Any], list[Any]]

_imported: weakref.WeakSet[ImportedBuffer] = weakref.WeakSet()


class SharedBuffer(_native.SharedBuffer):
    """A buffer of this process, for other processes to map: ``address`` is its device address here, which never
    changes, ``nbytes`` the size that importers name. Any method may raise DriverError, ContextLostError or
    ForkedProcessError; the buffer is then as it was, and the call can be repeated.

    ``export_fd()`` returns a new descriptor of the memory, for ``ImportedBuffer`` in another process; the caller closes
    it. Raises ConfigurationError while the buffer is released.

    ``release()`` copies the content to host memory and gives the device memory back; does nothing while released. The
    device gets it once no other process maps it and no exported descriptor is open. Raises OutOfHostMemoryError if
    there is no host memory for the content.

    ``restore()`` brings memory and content back; does nothing while resident. The memory is new and has to be exported
    again. Raises OutOfDeviceMemoryError if the device has too little free memory; the buffer stays released.
    """

    def __init__(self, device_index: int, nbytes: int) -> None:
        """Allocate ``nbytes`` zeros, rounded up to what a device maps at once (2 MiB on NVIDIA GPUs), on torch's device
        ``device_index``. Raises ConfigurationError if there is none, OutOfDeviceMemoryError if it has too little."""
        super().__init__(process.saver(), device_index, nbytes)


class ImportedBuffer(_native.ImportedBuffer):
    """A ``SharedBuffer`` of another process. ``address`` is its device address in this process, which never changes;
    nothing may use it unless ``mapped``. ``nbytes`` is the size. Any method may raise DriverError, ContextLostError or
    ForkedProcessError; the call can be repeated.

    ``drop()`` unmaps the memory and drops it; does nothing while dropped.

    ``map_again(fd)`` maps the memory of a descriptor, which remains the caller's, at the same address as before. Raises
    ConfigurationError if the buffer is mapped, or the descriptor is of another size.
    """

    def __init__(self, fd: int, nbytes: int, device_index: int) -> None:
        """Map the ``SharedBuffer`` of ``nbytes`` that exported ``fd``, for torch's device ``device_index``; the memory
        may lie on another one. The caller closes ``fd``, at any time from now on. Raises ConfigurationError if there is
        no such device, or the descriptor is of another size."""
        super().__init__(process.saver(), fd, nbytes, device_index)
        _imported.add(self)


def is_imported(address: int) -> bool:
    """Return whether a buffer of another process has this address, mapped or dropped."""
    return any(buffer.address == address for buffer in list(_imported))


def imported_bytes() -> int:
    """Return the bytes that this process maps of other processes' memory now."""
    return sum(buffer.nbytes for buffer in list(_imported) if buffer.mapped)


class PeerSockets:
    """A connection to each other rank of a group, for file descriptors. All ranks make it at the same time."""

    def __init__(self, rank: int, gather: Gather) -> None:
        """Connect to the others, on this host and of this user; raise MemsaverError if one is not there in time."""
        self.rank = rank
        listener = Listener(first=rank + 1)
        try:
            paths = gather(listener.path)
            self.ranks = listener.ranks = len(paths)
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

    def exchange(self, descriptor: int) -> Mapping[int, int]:
        """Send a file descriptor to each other rank; return theirs by rank, which the caller closes. Raises
        MemsaverError, with the rank, if one did not send its own within ``TIMEOUT_S``; no later exchange succeeds."""
        received: dict[int, int] = {}
        asked = self.rank
        try:
            for asked, peer in self._peers.items():  # noqa: B007  # named in the error
                socket.send_fds(peer, [b"\0"], [descriptor])
            for asked, peer in self._peers.items():
                _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
                if not descriptors:
                    raise ConnectionError("it closed the connection")
                received[asked] = descriptors[0]
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
        self.nbytes = self._own.nbytes
        self._others: dict[int, ImportedBuffer] = {}
        self._map_others()

    @property
    def addresses(self) -> list[int]:
        """The address of each rank's buffer in this process, in the order of the ranks. They never change."""
        others = {rank: each.address for rank, each in self._others.items()}
        return [address for _, address in sorted({**others, self.sockets.rank: self._own.address}.items())]

    def suspend(self) -> None:
        """Give the memory back; nothing on any rank may use it. Does nothing while suspended. Raises MemsaverError as
        ``SharedBuffer.release`` and ``ImportedBuffer.drop`` do; a repeat does the rest."""
        self.suspended = True
        for other in self._others.values():
            other.drop()
        self._own.release()

    def resume(self) -> None:
        """Bring the memory and its content back; return when every rank has called this. Raises MemsaverError as
        ``__init__`` does; ``suspended`` stays true."""
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
