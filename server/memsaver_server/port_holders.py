"""Which processes listen on a TCP port."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice, takewhile


def port_holders(port: int) -> list[str]:
    """Return the processes that listen on ``port``, for example a forked child of a server that has ended.

    Each is shown as its process number and command. Those of other users are left out unless this is root.
    """
    import psutil

    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            ports = (each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
            if port in ports:
                found.append(f"process {process.pid} ({_command(process.cmdline())})")
    return found


def _command(words: Iterable[str]) -> str:
    """Return the beginning of a process's command, without options, which may hold secrets."""
    shown = takewhile(lambda word: not word.startswith("--"), filter(None, words))
    return " ".join(os.path.basename(word)[:40] for word in islice(shown, 4)) or "unknown"
