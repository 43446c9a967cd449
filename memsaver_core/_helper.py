"""The hibernation helper: the process that checkpoints this one, and the socket to it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from memsaver_core import _native
from memsaver_core.errors import MemsaverError

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

    def __init__(self, driver: str, accounts: Sequence[tuple[int, int]], *, faults: bool) -> None:
        """Start it. ``accounts`` are the host driver's (descriptor, slot); with ``faults`` its steps can be failed.

        Raises:
            MemsaverError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        arguments = [str(PATH), str(os.getpid()), driver, *(f"{file}:{slot}" for file, slot in accounts)]
        environment = {**os.environ, "MEMSAVER_FAULT_INJECTION": "1" if faults else "0"}
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                arguments,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                pass_fds=[file for file, _ in accounts],
                env=environment,
            )
        except OSError as error:
            ours.close()
            raise MemsaverError(f"the hibernation helper cannot be started: {error}") from error
        finally:
            theirs.close()
        self._socket = ours
        self._answers = ours.makefile("r")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, *request: object) -> list[str]:
        """The words of the answer, without the first.

        Raises:
            StepFailedError: the driver refused.
            MemsaverError: the helper is gone.
        """
        try:
            self._socket.sendall((" ".join(map(str, request)) + "\n").encode())
            answer = self._answers.readline().split()
            reason: OSError | None = None
        except OSError as error:
            self._process.kill()
            answer, reason = [], error
        if not answer:
            self._process.wait()
            raise MemsaverError(
                f"the hibernation helper (process {self.pid}) ended during {request[0]!r}; repeat the call"
            ) from reason
        if answer[0] != "ok":
            raise StepFailedError(*answer[1:])
        return answer[1:]
