"""Disk space for backups in files: what is free, and what a prepared release reserves until it moves memory."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from typing import IO

from memsaver_core import _native, process
from memsaver_core.contract.errors import DiskFullError

_reserved: IO[bytes] | None = None

#: Whether files in a folder take memory of the host.
is_in_memory = _native.is_in_memory


def free_bytes() -> int:
    """Return the bytes that are free for backups in files, including what ``reserve`` took; 0 if their folder cannot be
    used."""
    folder = process.core_settings().file_dir
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    free = disk.f_bavail * disk.f_frsize
    free = min(free, _native.available_memory_bytes()) if is_in_memory(folder) else free
    return free + (0 if _reserved is None else os.fstat(_reserved.fileno()).st_size)


def number() -> int:
    """Return the number of the file system for backups in files on this host; 0 if their folder cannot be used."""
    try:
        return os.stat(process.core_settings().file_dir).st_dev
    except OSError:
        return 0


def full(needed: int, free: int) -> DiskFullError:
    return DiskFullError(
        f"the backups need {needed} bytes on the file system of {process.core_settings().file_dir}, and {free} are "
        "free; free disk space, or set MEMSAVER_FILE_DIR to a larger file system",
        needed,
        free,
    )


def reserve(size: int) -> None:
    """Take ``size`` bytes of disk space, so that no other process takes them before ``drop``, which the next release
    calls as well. Does nothing if the file system cannot reserve space. Raises DiskFullError if less is free: nothing
    is taken."""
    global _reserved
    drop()
    if size == 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        file = tempfile.TemporaryFile(dir=process.core_settings().file_dir)  # noqa: SIM115  # open until drop()
    except OSError:  # the release reports why
        return
    if libc.fallocate(file.fileno(), 0, ctypes.c_long(0), ctypes.c_long(size)) == 0:
        _reserved = file
        return
    code = ctypes.get_errno()
    file.close()
    if code in (errno.ENOSPC, errno.EDQUOT):
        raise full(size, free_bytes())


def drop() -> None:
    """Give back what ``reserve`` took, if anything."""
    global _reserved
    if _reserved is not None:
        _reserved.close()
        _reserved = None
