"""The hibernation helper: the process that checkpoints this one, and the socket to it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from memsaver_core import _native
from memsaver_core.errors import MemsaverError

#: How long a question may take that no memory is copied for, seconds: the first one waits for the driver to start.
ANSWER_S = 60.0
#: How long a checkpoint or a restore may take, seconds. What was not released is copied, at a fraction of the link's
#: speed; at a quarter of a gigabyte a second this is enough for 150 GB.
STEP_S = 600.0
_STEPS = ("hibernate", "wake")
#: How long the end of one that was killed is waited for, seconds.
END_S = 5.0

#: The helper's program.
PATH = Path(_native.__file__).with_name("memsaver-hibernate")


class StepFailedError(Exception):
    """The helper's answer to a step that failed.

    Attributes:
        call: the driver's name of the call.
        code: the driver's name of the error.
        state: what the driver says of this process now: running, locked, checkpointed, failed or unknown.
        device: where memory is short, of which device.
        needed_bytes: and how much is needed.
        free_bytes: and how much is free.
    """

    def __init__(self, call: str, code: str, state: str, device: str = "", needed: str = "0", free: str = "0") -> None:
        self.call, self.code, self.state, self.device = call, code, state, device
        self.needed_bytes, self.free_bytes = int(needed), int(free)
        super().__init__(f"{call} failed: {code}")


class Helper:
    """A helper process of ours, alive until this process ends."""

    def __init__(self, driver: str, accounts: Sequence[tuple[int, int]]) -> None:
        """Start it. ``accounts`` are the host driver's (descriptor, slot).

        Raises:
            MemsaverError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        arguments = [str(PATH), str(os.getpid()), driver, *(f"{file}:{slot}" for file, slot in accounts)]
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                arguments,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                pass_fds=[file for file, _ in accounts],
            )
        except OSError as error:
            ours.close()
            raise MemsaverError(f"the hibernation helper cannot be started: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        self._answers = ours.makefile("r")
        self._given_up = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._given_up and self._process.poll() is None

    def ask(self, *request: object) -> list[str]:
        """The words of the answer, without the first.

        Raises:
            StepFailedError: the driver refused.
            MemsaverError: the helper is gone, or has not answered in time and was ended. What it was about to do may
                have been done.
        """
        wait_s = STEP_S if request[0] in _STEPS else ANSWER_S
        try:
            self._socket.settimeout(wait_s)
            self._socket.sendall((" ".join(map(str, request)) + "\n").encode())
            answer = self._answers.readline().split()
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
        """End it. One that is inside a call of the driver may not end before that does, and nobody waits for it."""
        self._given_up = True
        self._process.kill()
        self._answers.close()
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
