"""``memsaver serve`` as a child process, as an operator runs it, on the host driver."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.native import injection
from tests.programs import Child

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ADDRESS = re.compile(r"(?:https?|unix)://\S+")
MEMSAVER = (sys.executable, "-m", "memsaver_server.cli")

#: Small enough for every test machine; tests that need more override it.
HOST_ENVIRONMENT = {"MEMSAVER_DRIVER": "host", "MEMSAVER_HOST_CAPACITY": "1GiB", "PYTHONFAULTHANDLER": "1"}


@dataclass
class Server:
    """A running ``memsaver serve``."""

    process: subprocess.Popen[str]
    url: str
    log_path: str

    @property
    def log(self) -> str:
        with open(self.log_path) as log:
            return log.read()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send ``number``, wait for the exit and return its code; if there is none, fail with what each thread does."""
        self.process.send_signal(number)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(60)
            raise AssertionError(f"it did not end: {self.log}") from None


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without its own MEMSAVER_ settings, plus ``changes``."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MEMSAVER_")}
    return {**inherited, **HOST_ENVIRONMENT, **(changes or {})}


@contextmanager
def serving(
    *options: str, changes: Mapping[str, str] | None = None, program: tuple[str, ...] = MEMSAVER
) -> Iterator[Server]:
    """Run ``memsaver serve`` with ``options`` while the block runs; it is ready when the block begins."""
    where = () if {"--port", "--uds"} & set(options) else ("--port", "0")
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(
            [*program, "serve", *where, *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment(changes),
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = ADDRESS.search(line)
            server = Server(process, match.group() if match else "", log.name)
            assert match, f"serve ended with {process.wait(60)}: {server.log}"
            yield server
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(60)
            if process.stdout is not None:
                process.stdout.close()


def memsaver(*arguments: str, changes: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a ``memsaver`` command to its end."""
    return subprocess.run(
        [*MEMSAVER, *arguments], capture_output=True, text=True, env=environment(changes), timeout=300, check=False
    )


def python_blocks(page: str) -> list[str]:
    """The Python examples of a page, given by its path in the project."""
    found: list[str] = BLOCK.findall((ROOT / page).read_text())
    return found


class Example(Child):
    """A page's example as a running program, which the test operates as a reader at a terminal."""

    def __init__(self, code: str) -> None:
        super().__init__("-u", "-c", code, inherited=environment())

    def read_address(self) -> str:
        """The address of the server in the next line."""
        address = ADDRESS.search(self.read_line())
        assert address is not None
        return address.group()


class Forks(Child):
    """Runs of ``memsaver serve`` that a test kills, one after another. A start takes one second instead of five."""

    def __init__(self) -> None:
        super().__init__(str(Path(__file__).with_name("forks.py")), inherited={**environment(), **injection.in_child()})
        self.pid = 0

    def serve(self, *options: str, changes: Mapping[str, str], phase: str = "", call: str = "") -> str:
        """Start a run after the last one has ended, and return its address.

        With ``phase`` it is held in the second phase of that name, and with ``call`` at the first such driver call
        there; ``read_line`` then tells when it is held.
        """
        request = {"arguments": ["serve", *options], "environment": dict(changes), "phase": phase, "call": call}
        self.pid = int(self.ask(json.dumps(request)))
        line = self.read_line()
        address = ADDRESS.search(line)
        if address is None:
            self.pid = 0
            raise AssertionError(f"it did not start: {line}")
        return address.group()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal to the running one, wait for its exit and return its code."""
        os.kill(self.pid, number)
        self.pid = 0
        while not (line := self.read_line()).startswith("exit "):
            assert line, "the program that starts them has ended"
        return int(line.split()[1])

    def __exit__(self, *exception: object) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
        super().__exit__(*exception)
