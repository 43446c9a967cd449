"""Which processes listen on a TCP port, from /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path

_LISTENING = "0A"  # TCP_LISTEN in the kernel's include/net/tcp_states.h


def port_holders(port: int) -> list[str]:
    """Return the processes that listen on ``port``, for example a forked child of a server that has ended.

    Each is shown as its process number and command. Those of other users are left out unless this is root.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return []
    numbers = sorted(int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit())
    return [f"process {number} ({_command(number)})" for number in numbers if sockets & _open_files(number)]


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                # sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode ...
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _open_files(number: int) -> set[str]:
    found = set()
    with suppress(OSError):  # it has ended, or is another user's
        for entry in os.scandir(f"/proc/{number}/fd"):
            with suppress(OSError):
                found.add(os.readlink(entry.path))
    return found


def _command(number: int) -> str:
    """Return the beginning of a process's command, without options, which may hold secrets."""
    try:
        command = os.fsdecode(Path(f"/proc/{number}/cmdline").read_bytes())
    except OSError:
        return "ended"
    words = takewhile(lambda word: not word.startswith("--"), filter(None, command.split("\0")))
    return " ".join(os.path.basename(word)[:40] for word in islice(words, 4)) or "unknown"
