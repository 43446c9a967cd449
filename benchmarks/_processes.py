"""Servers in separate processes: ports for them, and their end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

#: How long the kernel may take to end a process and give back its device memory, seconds.
_END_S = 60.0


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback address that nobody has bound."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def end(process: subprocess.Popen[Any], patience_s: float = 0.0) -> None:
    """End a process that leads a session, and every one that it has started.

    Returns once none of them is left: until then the driver counts their memory.

    Args:
        patience_s: how long it may take to end by itself.

    Raises:
        RuntimeError: some are still left.
    """
    if patience_s:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + _END_S
    while _is_running(process.pid):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of the group {process.pid} are still there {_END_S:g} s after SIGKILL")
        time.sleep(0.05)


def _is_running(group: int) -> bool:
    """Whether a process of the group has a thread that has not ended. Those that nobody waits for stay as zombies."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            state, in_group, threads = fields[0], int(fields[2]), int(fields[17])
            if in_group == group and (state not in "ZX" or threads > 1):
                return True
    return False
