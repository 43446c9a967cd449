"""A process that makes or imports shared buffers, told line by line what to do; `Peer` starts one.

Each answer is one line. Descriptors travel beside the lines, over a Unix socket.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import memsaver_core as ms
from memsaver_core import _native, process, shared_buffers
from tests.programs import Child

KEY = (1, 2, 3, 4)


class Peer(Child):
    """A process with one buffer on a device; ``folder`` is for the socket."""

    def __init__(self, folder: Path, kind: str, device: int) -> None:
        path = str(folder / f"peer-{id(self)}")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path)
            listening.listen()
            super().__init__("-m", "tests.devices.sharing_peer", kind, str(device), path)
            self._socket = listening.accept()[0]

    def __exit__(self, *exception: object) -> None:
        self._socket.close()
        super().__exit__(*exception)

    def do(self, *order: object) -> str:
        """What it answers; fails if it raised."""
        answer = self.ask(" ".join(map(str, order)))
        assert not answer.startswith("raised"), answer
        return answer

    @contextmanager
    def exported(self) -> Any:
        """A descriptor of its buffer."""
        self.do("export")
        (fd,) = socket.recv_fds(self._socket, 1, 1)[1]
        yield fd
        os.close(fd)

    def take(self, order: str, fd: int, *arguments: object) -> str:
        """Let it ``import`` or ``map_again`` the memory of a descriptor. Returns the address."""
        socket.send_fds(self._socket, [b"."], [fd])
        return self.do(order, *arguments)


class Memory:
    """Reads and writes device memory by its address."""

    def __init__(self, kind: str, device: int) -> None:
        self._device = device
        self._cuda: Any = None
        if kind == "cuda":
            import torch

            torch.cuda.set_device(device)
            torch.zeros(1, device="cuda")
            self._cuda = ctypes.CDLL("libcuda.so.1")

    def write(self, address: int, seed: int, nbytes: int) -> None:
        content = content_of(seed, nbytes)
        if self._cuda is None:
            ctypes.memmove(address, content, nbytes)
        else:
            assert self._cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(address), content, ctypes.c_size_t(nbytes)) == 0
            process.saver().synchronize()

    def read(self, address: int, nbytes: int) -> str:
        """A hash of the content, which a copy and a kernel must see alike."""
        content = ctypes.create_string_buffer(nbytes)
        if self._cuda is None:
            ctypes.memmove(content, address, nbytes)
        else:
            assert self._cuda.cuMemcpyDtoH_v2(content, ctypes.c_uint64(address), ctypes.c_size_t(nbytes)) == 0
        assert process.saver().digest(self._device, address, nbytes, KEY) == _native.digest_of(content, KEY)
        return hashlib.sha256(content).hexdigest()


def content_of(seed: int, nbytes: int) -> bytes:
    """Random bytes; zeros for 0."""
    return bytes(nbytes) if seed == 0 else np.random.default_rng(seed).bytes(nbytes)


def hash_of(seed: int, nbytes: int) -> str:
    return hashlib.sha256(content_of(seed, nbytes)).hexdigest()


def orders(kind: str, device: int, connection: socket.socket) -> dict[str, Callable[..., object]]:
    memory = Memory(kind, device)
    held: list[Any] = []

    def make(nbytes: str) -> str:
        held.append(shared_buffers.SharedBuffer(device, int(nbytes)))
        return f"{held[0].address} {held[0].nbytes}"

    def export() -> None:
        fd = held[0].export_fd()
        socket.send_fds(connection, [b"."], [fd])
        os.close(fd)

    def import_(nbytes: str) -> int:
        (fd,) = socket.recv_fds(connection, 1, 1)[1]
        held.append(shared_buffers.ImportedBuffer(fd, int(nbytes), device))
        os.close(fd)
        return int(held[0].address)

    def map_again() -> int:
        (fd,) = socket.recv_fds(connection, 1, 1)[1]
        try:
            held[0].map_again(fd)
        finally:
            os.close(fd)
        return int(held[0].address)

    return {
        "make": make,
        "export": export,
        "import": import_,
        "map_again": map_again,
        "write": lambda seed: memory.write(held[0].address, int(seed), held[0].nbytes),
        "read": lambda: memory.read(held[0].address, held[0].nbytes),
        "release": lambda: held[0].release(),
        "restore": lambda: held[0].restore(),
        "drop": lambda: held[0].drop(),
        "forget": held.clear,
        "imported": shared_buffers.imported_bytes,
        "free": lambda: process.saver().memory_info(device)[0],
        "hibernate": lambda: ms.release(hibernate=True) and ms.status().hibernated,
        "wake": lambda: ms.resume() and ms.status().hibernated,
    }


def main() -> None:
    kind, device, path = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        known = orders(kind, int(device), connection)
        for line in sys.stdin:
            name, *arguments = line.split()
            try:
                print(known[name](*arguments), flush=True)
            except ms.MemsaverError as error:
                print(f"raised {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
