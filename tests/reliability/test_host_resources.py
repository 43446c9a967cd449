"""Host memory and disk space really run out: in a control group and on a small disk of a child process."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memsaver_core import _native
from memsaver_core.contract.errors import OutOfDeviceMemoryError, OutOfHostMemoryError
from tests.native import injection
from tests.programs import output_of
from tests.reliability.surroundings import (
    ControlGroup,
    control_group,
    in_child,
    keep_mounts_private,
    mount_small_disk,
)
from tests.unit.saver_memory import MIB, PAGE, content, fill, view
from tests.waiting import wait_until

GROUP = 192 * MIB


@pytest.fixture(params=[1, 2])
def group(request: pytest.FixtureRequest) -> Iterator[ControlGroup]:
    """An empty control group, of the version that the machine has."""
    with control_group(GROUP, request.param) as group:
        yield group


def make(folder: Path | str = "/tmp", **settings: Any) -> _native.Saver:
    """Backups take what the content takes; nothing is taken for packing, which on a host device is host memory, too."""
    settings = {"host_capacity": 256 * MIB, "verify": "full", "pack": False, **settings}
    return _native.Saver(driver="host", file_folder=str(folder), **settings)


def mark(address: int, nbytes: int) -> None:
    """Write a word to each page, without a copy of the content, which would count too."""
    for at in range(0, nbytes, PAGE):
        ctypes.c_uint64.from_address(address + at).value = at + 1


def is_marked(address: int, nbytes: int) -> bool:
    return all(ctypes.c_uint64.from_address(address + at).value == at + 1 for at in range(0, nbytes, PAGE))


@pytest.mark.guards("a backup larger than host memory ended in the OOM killer")
def test_a_backup_larger_than_the_control_group_allows(group: ControlGroup) -> None:
    """It is refused with figures instead of meeting the OOM killer, nothing is unmapped, and with room it works."""
    nbytes = 112 * MIB

    def body() -> None:
        group.enter()
        saver = make()
        address = saver.allocate(0, "t", "host", nbytes)
        mark(address, nbytes)
        with pytest.raises(OutOfHostMemoryError, match="too little memory for the backup") as refused:
            saver.release([], [], {})
        assert refused.value.needed_bytes == nbytes
        assert 0 < refused.value.free_bytes < GROUP - nbytes
        assert saver.audit() == []
        assert is_marked(address, nbytes)
        group.limit(2 * GROUP)
        saver.release([], [], {})
        saver.resume([])
        assert is_marked(address, nbytes)

    in_child(body)


@pytest.mark.guards("a backup larger than host memory ended in the OOM killer")
def test_a_backup_prepared_in_the_background_keeps_to_the_control_group(group: ControlGroup) -> None:
    """Pinning ahead of the first release does not exceed the limit."""
    nbytes = 112 * MIB

    def body() -> None:
        group.enter()
        saver = make()
        mark(saver.allocate(0, "t", "host", nbytes), nbytes)
        saver.prepare_backup()
        with pytest.raises(OutOfHostMemoryError, match="too little memory for the backup"):
            saver.wait_until_prepared()
        assert saver.status()["host_backup"]["capacity_bytes"] == 0
        group.limit(2 * GROUP)
        saver.prepare_backup()
        saver.wait_until_prepared()
        assert saver.status()["host_backup"]["capacity_bytes"] == nbytes

    in_child(body)


@pytest.mark.guards("a backup larger than host memory ended in the OOM killer")
def test_page_cache_makes_way_for_a_backup(group: ControlGroup, tmp_path: Path) -> None:
    """Page cache that the kernel can reclaim, such as that of weight files, causes no refusal."""
    nbytes = 64 * MIB

    def body() -> None:
        group.enter()
        path = tmp_path / "weights"
        path.write_bytes(bytes(2 * nbytes))
        with path.open("rb") as file:
            os.fsync(file.fileno())
            for _ in range(2):  # after the second read the kernel considers it in active use
                file.seek(0)
                while file.read(MIB):
                    pass
        saver = make()
        address = saver.allocate(0, "t", "host", nbytes)
        mark(address, nbytes)
        saver.release([], [], {})
        saver.resume([])
        assert is_marked(address, nbytes)

    in_child(body)


@pytest.mark.guards("a backup larger than host memory ended in the OOM killer")
def test_a_backup_file_in_memory_keeps_to_the_control_group(group: ControlGroup, tmp_path: Path) -> None:
    """Files in tmpfs count as memory, however much space the file system reports."""
    nbytes = 112 * MIB

    def body() -> None:
        keep_mounts_private()
        mount_small_disk(tmp_path, 4 * GROUP)
        group.enter()
        saver = make(tmp_path)
        address = saver.allocate(0, "t", "file", nbytes)
        mark(address, nbytes)
        with pytest.raises(OutOfHostMemoryError, match="too little space") as refused:
            saver.release([], [], {})
        assert refused.value.needed_bytes == nbytes
        assert refused.value.free_bytes < GROUP
        assert saver.audit() == []
        assert is_marked(address, nbytes)

    in_child(body)


@pytest.mark.parametrize(
    ("figures", "available"),
    [
        ({"memory.max": "1000000", "memory.current": "400000"}, 600_000),
        ({"memory.max": "1000000", "memory.high": "700000", "memory.current": "400000"}, 300_000),
        ({"memory.max": "max", "memory.high": "700000", "memory.current": "800000"}, 0),
        (
            {
                "memory.max": "1000000",
                "memory.current": "900000",
                "memory.stat": "anon 1\nactive_file 100000\ninactive_file 200000\nshmem 5\n",
            },
            400_000,
        ),
    ],
)
@pytest.mark.guards("a backup larger than host memory ended in the OOM killer")
def test_control_groups_of_version_2_are_read(tmp_path: Path, figures: dict[str, str], available: int) -> None:
    """From files as the kernel writes them, wherever this process's group is mounted."""

    def body() -> None:
        keep_mounts_private()
        for name, text in figures.items():
            (tmp_path / name).write_text(text + "\n")
        libc = ctypes.CDLL(None, use_errno=True)
        bind = 0x1000
        if libc.mount(os.fsencode(tmp_path), b"/sys/fs/cgroup", None, bind, None) != 0:
            pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")
        assert _native.available_memory_bytes() == available

    in_child(body)


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_the_disk_fills_up_in_the_middle_of_a_backup(tmp_path: Path) -> None:
    """What was not written stays resident, what was written comes back; with space the release works."""
    part = 8 * MIB

    def body() -> None:
        keep_mounts_private()
        mount_small_disk(tmp_path, 8 * part)
        saver = make(tmp_path)
        addresses = [saver.allocate(0, "t", "file", part) for _ in range(4)]
        written = [fill(address, part, seed) for seed, address in enumerate(addresses)]
        failures: list[Exception] = []

        def release() -> None:
            try:
                saver.release([], [], {})
            except OutOfHostMemoryError as error:
                failures.append(error)

        saver.delay("copy_to_host", 3600)  # until heal(); the disk space has been checked by then
        thread = threading.Thread(target=release)
        thread.start()
        wait_until(lambda: saver.counts().get("copy_to_host", 0) != 0)
        intruder = tmp_path / "intruder"
        with intruder.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 6 * part)  # leaves space for two of four
        saver.heal()
        thread.join()
        assert len(failures) == 1
        assert "ENOSPC" in str(failures[0])
        assert "tag 't'" in str(failures[0])
        assert "MEMSAVER_FILE_DIR" in str(failures[0])
        assert saver.audit() == []
        saver.resume([])
        assert [content(address, part) for address in addresses] == written
        with pytest.raises(OutOfHostMemoryError):
            saver.release([], [], {})
        intruder.unlink()
        saver.release([], [], {})
        assert saver.status()["state"] == "released"
        saver.resume([])
        assert [content(address, part) for address in addresses] == written
        assert saver.audit() == []

    in_child(body)


def test_packed_content_needs_less_of_the_disk(tmp_path: Path) -> None:
    """A release of other content of the same kind is not refused for space that it will not take."""

    def body() -> None:
        keep_mounts_private()
        mount_small_disk(tmp_path, 176 * MIB)
        saver = make(tmp_path, host_capacity=512 * MIB, pack=True)
        address = saver.allocate(0, "t", "file", 160 * MIB)
        exponents = np.random.default_rng(1).integers(0x3C00, 0x3D00, 80 * MIB, dtype=np.uint16)
        for flipped in (0, 1):
            view(address, 160 * MIB).view(np.uint16)[:] = exponents ^ flipped
            saver.release([], [], {})
            if not flipped:
                space = os.statvfs(tmp_path)
                with (tmp_path / "intruder").open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - 4 * MIB)
            saver.resume([])
        assert (view(address, 160 * MIB).view(np.uint16) == exponents ^ 1).all()

    in_child(body)


@pytest.mark.parametrize("policy", ["file", "zero"])
@pytest.mark.guards("running out of memory or other resources killed the process")
def test_a_host_device_keeps_to_the_control_group(group: ControlGroup, tmp_path: Path, policy: str) -> None:
    """Its memory is host memory: a resume and an allocation beyond the limit are refused, and with room they work."""
    nbytes = 112 * MIB

    def body() -> None:
        group.enter()
        saver = make(tmp_path)
        address = saver.allocate(0, "t", policy, nbytes)
        mark(address, nbytes)
        if policy == "file":  # tight, with the memory for transfers
            tight = bytearray(group.free() - 48 * MIB)  # one block can be on its way, not two
            saver.release([], [], {})
            del tight
        saver.release([], [], {})
        ballast = bytearray(112 * MIB)
        for refused in (lambda: saver.resume([]), lambda: saver.allocate(0, "u", "discard", nbytes)):
            with pytest.raises(OutOfDeviceMemoryError, match="control group") as error:
                refused()
            assert error.value.needed_bytes > error.value.free_bytes
            assert error.value.free_bytes < GROUP - len(ballast)
        assert saver.audit() == []
        del ballast
        saver.resume([])
        assert policy == "zero" or is_marked(address, nbytes)

    in_child(body)


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_a_release_that_runs_out_of_addresses_is_undone() -> None:
    """A backup that finds no more address space in the middle leaves all memory resident, with its content."""
    program = "from tests.reliability import test_host_resources as t; t.run_out_of_addresses()"
    output_of(program, by_itself=True, **injection.in_child())


def run_out_of_addresses() -> None:
    nbytes = 224 * MIB  # the second slice of host memory does not fit
    saver = make()
    address = saver.allocate(0, "t", "host", nbytes)
    mark(address, nbytes)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 160 * MIB, resource.RLIM_INFINITY))
    with pytest.raises(OutOfHostMemoryError, match="mmap failed: ENOMEM"):
        saver.release([], [], {})
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    # Whether some of it had been released depends on the threads' order; test_every_call has a failure at each place.
    assert saver.status()["state"] == "resident"
    assert is_marked(address, nbytes)
    assert saver.audit() == []
    saver.release([], [], {})
    saver.resume([])
    assert is_marked(address, nbytes)
