"""Other users, other processes and other tags see nothing of this process's memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import stat
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from memsaver_core import _native
from memsaver_core.contract.errors import MemsaverError
from tests.unit.saver_memory import MIB, PAGE, content, fill, view

SECRET = b"a tag's own words"
GAP = 128 << 10


def make(folder: Path, **settings: Any) -> _native.Saver:
    return _native.Saver(driver="host", host_capacity=64 * MIB, file_folder=str(folder), verify="full", **settings)


def backup_files(folder: Path) -> list[str]:
    """The open files of this process that are or were in the folder, as names under /proc."""
    names = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.lexists(path) and os.readlink(path).startswith(str(folder)):
            names.append(path)
    return names


def test_backup_files_have_no_name_and_one_reader(tmp_path: Path) -> None:
    """Mode 0600 with any umask, and no name in the folder while in use."""
    before = os.umask(0)
    try:
        saver = make(tmp_path)
        address = saver.allocate(0, "t", "file", MIB)
        written = fill(address, MIB, 1)
        saver.release([], [], {})
    finally:
        os.umask(before)
    [name] = backup_files(tmp_path)
    about = os.stat(name)
    assert stat.S_IMODE(about.st_mode) == 0o600
    assert (about.st_nlink, about.st_uid) == (0, os.getuid())
    assert list(tmp_path.iterdir()) == []
    saver.resume([])
    assert content(address, MIB) == written


def test_backup_memory_is_kept_out_of_forked_children(tmp_path: Path) -> None:
    saver = make(tmp_path)
    address = saver.allocate(0, "t", "host", MIB)
    fill(address, MIB, 1)
    saver.release([], [], {})
    memory = saver.backup_of(address, MIB, 0)["memory"]
    assert memory != 0

    def child(pipe: Connection) -> None:
        with open("/proc/self/mem", "rb", buffering=0) as file:
            file.seek(memory)
            try:
                pipe.send(file.read(PAGE))
            except OSError:
                pipe.send("nothing is there")

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.recv() == "nothing is there"
    process.join()


@pytest.mark.parametrize("policy", ["host", "file"])
def test_nothing_of_another_tag_is_left_in_a_backup(tmp_path: Path, policy: str) -> None:
    """Pinned memory is reused by other tags. The part of the last page that a backup does not fill is cleared, also
    in the file."""
    saver = make(tmp_path)
    theirs = saver.allocate(0, "theirs", "host", MIB)
    view(theirs, MIB)[:] = list(SECRET.ljust(32)) * (MIB // 32)
    saver.release([], [], {})
    memory = saver.backup_of(theirs, MIB, 0)["memory"]
    assert SECRET in ctypes.string_at(memory, MIB)
    saver.free(theirs)  # its backup goes back to the pool
    mine = saver.allocate(0, "mine", policy, MIB)
    fill(mine, MIB, 1)
    live = MIB - GAP - 512
    saver.release([], [(mine + live, GAP + 512)], {})
    room = (live + PAGE - 1) // PAGE * PAGE
    if policy == "host":
        reused = saver.backup_of(mine, live, 0)["memory"]
        assert memory <= reused < memory + MIB
        kept = ctypes.string_at(reused, room)
    else:
        [name] = backup_files(tmp_path)
        kept = Path(name).read_bytes()
    assert len(kept) == room
    assert kept[live:] == bytes(room - live)
    assert SECRET not in kept


def test_the_account_of_a_host_device_is_its_user_s(tmp_path: Path) -> None:
    """Mode 0600 with any umask, and never opened through a symbolic link."""
    name = f"privacy-{uuid.uuid4().hex[:12]}"
    path = Path(f"/dev/shm/memsaver-{os.getuid()}-{name}")
    before = os.umask(0)
    try:
        saver = make(tmp_path, host_devices=[name])
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    del saver
    assert not path.exists()
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path.symlink_to(precious)
    try:
        with pytest.raises(MemsaverError, match="cannot be opened"):
            make(tmp_path, host_devices=[name])
    finally:
        path.unlink()
    assert precious.read_text() == "precious"
