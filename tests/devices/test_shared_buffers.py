"""Memory that processes share, given back and brought back at the same addresses."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memsaver_core import process, shared_buffers
from memsaver_core.contract.errors import ConfigurationError, DriverError
from tests.devices.sharing_peer import Memory, Peer, hash_of
from tests.programs import output_of

SIZE = 4 << 20  # a multiple of what every device maps at once


@pytest.fixture
def peers(device: str, tmp_path: Path) -> Iterator[tuple[Peer, Peer]]:
    """The owner of a buffer and another process, on the second GPU if there are two."""
    other = 1 if device == "cuda" and torch.cuda.device_count() > 1 else 0
    with Peer(tmp_path, device, 0) as owner, Peer(tmp_path, device, other) as importer:
        yield owner, importer


def share(owner: Peer, importer: Peer) -> tuple[str, str]:
    """Let one make a buffer and the other import it. Returns the address in each process."""
    address, nbytes = owner.do("make", SIZE).split()
    assert int(nbytes) == SIZE
    with owner.exported() as fd:
        return address, importer.take("import", fd, SIZE)


def test_both_processes_use_one_memory(peers: tuple[Peer, Peer]) -> None:
    """It is zeros at first; what either writes the other reads, by copies and by kernels."""
    owner, importer = peers
    share(owner, importer)
    assert owner.do("read") == importer.do("read") == hash_of(0, SIZE)
    for seed, writer, reader in ((1, owner, importer), (2, importer, owner)):
        writer.do("write", seed)
        assert reader.do("read") == hash_of(seed, SIZE)


@pytest.mark.parametrize("hibernate", [False, True])
def test_address_and_content_survive(peers: tuple[Peer, Peer], hibernate: bool) -> None:
    """Dropped, released and, if asked for, both processes hibernated; then mapped again, twice."""
    owner, importer = peers
    share(owner, importer)
    address = ""
    for seed in (1, 2):
        importer.do("write", seed)
        assert int(importer.do("imported")) == SIZE
        importer.do("drop")
        assert importer.do("imported") == "0"
        importer.do("drop")  # a repeat is success
        owner.do("release")
        owner.do("release")
        if hibernate:
            assert owner.do("hibernate") == importer.do("hibernate") == "True"
            assert owner.do("wake") == importer.do("wake") == "False"
        owner.do("restore")
        owner.do("restore")
        with owner.exported() as fd:
            again = importer.take("map_again", fd)
        assert address in ("", again)
        address = again
        assert owner.do("read") == importer.do("read") == hash_of(seed, SIZE)
        owner.do("write", seed + 10)
        assert importer.do("read") == hash_of(seed + 10, SIZE)


def test_released_is_back_with_the_device(peers: tuple[Peer, Peer]) -> None:
    owner, importer = peers
    share(owner, importer)
    importer.do("drop")
    owner.do("release")  # what a device takes once for itself does not count
    owner.do("restore")
    before = int(owner.do("free"))
    owner.do("release")
    assert int(owner.do("free")) == before + SIZE
    owner.do("restore")
    assert int(owner.do("free")) == before
    owner.do("forget")
    assert int(owner.do("free")) == before + SIZE


def test_an_importer_keeps_the_memory_when_the_owner_ends(peers: tuple[Peer, Peer]) -> None:
    """A killed owner takes nothing from under another process."""
    owner, importer = peers
    share(owner, importer)
    owner.do("write", 3)
    owner.kill()
    assert importer.do("read") == hash_of(3, SIZE)
    importer.do("drop")


def test_wrong_calls_change_nothing(device: str) -> None:
    buffer = shared_buffers.SharedBuffer(0, SIZE - 100)
    assert buffer.nbytes == SIZE
    memory = Memory(device, 0)
    memory.write(buffer.address, 4, SIZE)
    fd = buffer.export_fd()
    imported = shared_buffers.ImportedBuffer(fd, SIZE, 0)
    assert imported.address != buffer.address
    with pytest.raises(ConfigurationError, match="drop it first"):
        imported.map_again(fd)
    with pytest.raises((ConfigurationError, DriverError)):
        shared_buffers.ImportedBuffer(fd, 2 * SIZE, 0)
    os.close(fd)
    with pytest.raises(DriverError, match=f"device 0, {SIZE} bytes"):
        shared_buffers.ImportedBuffer(fd, SIZE, 0)
    with pytest.raises(ConfigurationError, match="there is no"):
        shared_buffers.SharedBuffer(99, SIZE)
    assert shared_buffers.imported_bytes() == SIZE
    assert memory.read(imported.address, SIZE) == hash_of(4, SIZE)
    imported.drop()
    buffer.release()
    with pytest.raises(ConfigurationError, match="restore it first"):
        buffer.export_fd()
    with pytest.raises(DriverError):
        imported.map_again(fd)
    assert shared_buffers.imported_bytes() == 0
    buffer.restore()
    assert memory.read(buffer.address, SIZE) == hash_of(4, SIZE)
    free = process.saver().memory_info(0)[0]
    del buffer, imported
    gc.collect()
    assert process.saver().memory_info(0)[0] == free + SIZE


@pytest.mark.guards("a forked child used or damaged its parent's memory")
def test_a_forked_child_gives_nothing_back(device: str) -> None:
    told = output_of(
        f"""
        import os
        from memsaver_core import ForkedProcessError, process
        from tests.devices.sharing_peer import Memory, hash_of
        from memsaver_core.shared_buffers import SharedBuffer
        buffer = SharedBuffer(0, {SIZE})
        memory = Memory({device!r}, 0)
        memory.write(buffer.address, 5, {SIZE})
        free = process.saver().memory_info(0)[0]
        child = os.fork()
        if child == 0:
            try:
                buffer.release()
            except ForkedProcessError:
                del buffer
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert process.saver().memory_info(0)[0] == free
        assert memory.read(buffer.address, {SIZE}) == hash_of(5, {SIZE})
        print("whole")
        """
    )
    assert told == "whole\n"
