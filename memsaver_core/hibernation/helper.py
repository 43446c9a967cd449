"""The hibernation helper: the process that checkpoints this one, and the socket to it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from memsaver_core import _native
from memsaver_core.contract.errors import MemsaverError

#: Timeout of a request that copies no memory, seconds; the first one waits for the driver to start.
ANSWER_S = 60.0
#: Timeout of a checkpoint or wake, seconds: enough for 150 GB that were not released, if the driver copies 0.25 GB/s.
STEP_S = 600.0
_STEPS = ("lock", "checkpoint", "restore", "unlock")
#: How long to wait for a killed helper to end, seconds.
END_S = 5.0

#: Path of the helper program.
PATH = Path(_native.__file__).with_name("memsaver-hibernate")


class StepFailedError(MemsaverError):
    """The helper's answer that a step failed. ``state`` is the driver's of this process now: running, locked,
    checkpointed, failed or unknown. If memory is short, ``device`` names the device and ``needed_bytes`` is not 0."""

    def __init__(self, call: str, code: str, state: str, device: str = "", needed: str = "0", free: str = "0") -> None:
        self.call, self.code, self.state, self.device = call, code, state, device
        self.needed_bytes, self.free_bytes = int(needed), int(free)
        super().__init__(f"{call} failed: {code}")


class Helper:
    """A running helper process, alive until this process ends."""

    def __init__(self, driver: str, accounts: Sequence[tuple[int, int]]) -> None:
        """Start it; raise MemsaverError if that fails. ``accounts`` are the host driver's (descriptor, slot)."""
        arguments = [str(PATH), str(os.getpid()), driver, *(f"{file}:{slot}" for file, slot in accounts)]
        try:
            self._socket, theirs = socket.socketpair()
            with theirs, ExitStack() as undo:
                undo.callback(self._socket.close)
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    arguments, stdin=theirs.fileno(), stdout=theirs.fileno(), pass_fds=[file for file, _ in accounts]
                )
                undo.pop_all()
        except OSError as error:
            raise MemsaverError(
                f"the hibernation helper cannot be started: {error}; repeat the call when it can"
            ) from error
        self.pid = self._process.pid
        self._replies = self._socket.makefile("r")
        self._given_up = False

    @property
    def alive(self) -> bool:
        return not self._given_up and self._process.poll() is None

    def ask(self, *request: object) -> list[str]:
        """Send a request, and return the words of the answer after ``ok``. Raises StepFailedError if the driver
        refused, MemsaverError if the helper has ended, or was late and is killed; the step may have been taken."""
        wait_s = STEP_S if request[0] in _STEPS else ANSWER_S
        try:
            self._socket.settimeout(wait_s)
            self._socket.sendall((" ".join(map(str, request)) + "\n").encode())
            answer = self._replies.readline().split()
            reason: OSError | None = None
        except OSError as error:
            answer, reason = [], error
        if not answer:
            self._give_up()
            became = f"did not answer for {wait_s:g} s" if isinstance(reason, TimeoutError) else "ended"
            raise MemsaverError(
                f"the hibernation helper (process {self.pid}) {became} during {request[0]!r}; repeat the call"
            ) from reason
        if answer[0] != "ok":
            raise StepFailedError(*answer[1:])
        return answer[1:]

    def _give_up(self) -> None:
        """Kill the process. Inside a driver call it may not end before that call does, which is not waited for."""
        self._given_up = True
        self._process.kill()
        self._replies.close()
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
