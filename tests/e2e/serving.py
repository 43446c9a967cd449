"""``memsaver serve`` as a child process, as an operator runs it, on the host driver.

It is a fork that has loaded what ``serve`` loads; ``memsaver demo`` starts one by itself.
"""

from __future__ import annotations

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

from tests import forks
from tests.native import injection
from tests.programs import Child

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
ADDRESS = re.compile(r"(?:https?|unix)://\S+")
MEMSAVER = (sys.executable, "-m", "memsaver_server.cli")
#: ``memsaver``, whose ranks are forks.
FORKED_RANKS = (
    sys.executable,
    "-c",
    """
from memsaver_server.reference import ranks
from tests import forks
ranks.subprocess = forks
from memsaver_server.cli import main
main()
""",
)
#: What an install of memsaver puts on the PATH.
CONSOLE_SCRIPT = (str(Path(sys.executable).with_name("memsaver")),)

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
            return self.process.wait(600)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(600)
            raise AssertionError(f"it did not end: {self.log}") from None


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without its own MEMSAVER_ settings, plus ``changes`` and, on the host driver, the
    process that forks."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MEMSAVER_")}
    its_own = {**inherited, **HOST_ENVIRONMENT, **(changes or {})}
    return its_own if its_own["MEMSAVER_DRIVER"] != "host" else {forks.VARIABLE: forks.address(None), **its_own}


@contextmanager
def serving(
    *options: str,
    changes: Mapping[str, str] | None = None,
    program: tuple[str, ...] = MEMSAVER,
) -> Iterator[Server]:
    """Run ``memsaver serve`` with ``options`` while the block runs; it is ready when the block begins."""
    where = () if {"--port", "--uds"} & set(options) else ("--port", "0")
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = forks.Popen(
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
            assert match, f"serve ended with {process.wait(600)}: {server.log}"
            yield server
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(600)
            if process.stdout is not None:
                process.stdout.close()


def memsaver(*arguments: str, changes: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a ``memsaver`` command to its end."""
    ran: subprocess.CompletedProcess[str] = forks.run(
        [*MEMSAVER, *arguments], capture_output=True, text=True, env=environment(changes), timeout=800, check=False
    )
    return ran


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


class HeldServe(Child):
    """A run of ``memsaver serve`` that a test kills, held in the second phase of that name, if any.

    With ``call`` it is held at the first such driver call there; ``read_line`` then reports when it is.
    """

    def __init__(self, *options: str, changes: Mapping[str, str], phase: str = "", call: str = "") -> None:
        program = str(Path(__file__).with_name("held_serve.py"))
        arguments = (program, phase, call, "serve", *options)
        super().__init__(*arguments, inherited={**environment(changes), **injection.in_child()})
        line = self.read_line()
        address = ADDRESS.search(line)
        assert address is not None, f"it did not start: {line}"
        self.url = address.group()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait for the exit and return its code."""
        self.process.send_signal(number)
        self.process.communicate(timeout=600)
        return self.process.returncode
