"""New pages of a host device that hold garbage, as those of a GPU whose driver does not clear freed memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GARBAGE = 0xFF  # NaN as a float of any size


@contextmanager
def dirty_pages(address: int, nbytes: int) -> Iterator[None]:
    """While the block runs, at least the next ``nbytes`` that the host device of ``address`` hands out are garbage.

    The device is a file; it hands out the next bytes of it each time and does not clear them. ``address`` must be
    mapped.
    """
    device_file = next(each.file for each in _mappings() if each.begin <= address < each.end)
    device = next(os.open(each, os.O_RDWR) for each in Path("/proc/self/fd").iterdir() if _file(each) == device_file)
    try:
        end = os.fstat(device).st_size
        page = bytes([GARBAGE]) * (1 << 20)
        for at in range(end, end + nbytes, len(page)):
            os.pwrite(device, page, at)
        yield
    finally:
        # Bytes that were not handed out must not be garbage for later tests.
        os.truncate(device, max([end, *(each.end_in_file for each in _mappings() if each.file == device_file)]))
        os.close(device)


class _Mapping:
    """A line of this process's memory map; its file is identified by device number and inode."""

    def __init__(self, line: str) -> None:
        addresses, _, offset, device, inode = line.split()[:5]
        self.begin, self.end = (int(each, 16) for each in addresses.split("-"))
        self.file = (os.makedev(*(int(each, 16) for each in device.split(":"))), int(inode))
        self.end_in_file = int(offset, 16) + self.end - self.begin


def _mappings() -> list[_Mapping]:
    return [_Mapping(line) for line in Path("/proc/self/maps").read_text().splitlines()]


def _file(path: Path) -> tuple[int, int] | None:
    try:
        about = path.stat()
    except FileNotFoundError:  # closed since it was listed
        return None
    return about.st_dev, about.st_ino
