"""Python programs as child processes: run to their end, or in a dialogue line by line.

They are forks of a process that has imported what takes seconds to import, unless they are to start ``by_itself``: what
asserts addresses, footprint, peers or imports. What is given LD_PRELOAD does so, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import Any, TypeVar

from tests import forks

Own = TypeVar("Own", bound="Child")


def _start_with(environment: Mapping[str, str], by_itself: bool) -> Any:
    """What has ``Popen`` and ``run``."""
    return subprocess if by_itself or "LD_PRELOAD" in environment else forks


def run_python(
    code: str, *arguments: str, inherited: Mapping[str, str] = os.environ, by_itself: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with success or not."""
    environment = {**inherited, **environment}
    ran: subprocess.CompletedProcess[str] = _start_with(environment, by_itself).run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        env=environment,
    )
    return ran


def output_of(
    code: str, *arguments: str, inherited: Mapping[str, str] = os.environ, by_itself: bool = False, **environment: str
) -> str:
    """The output of a program that must succeed; if not, fails with its output."""
    ran = run_python(code, *arguments, inherited=inherited, by_itself=by_itself, **environment)
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


class Child:
    """A program with which a test exchanges lines; its arguments are the interpreter's."""

    def __init__(
        self,
        *arguments: str,
        inherited: Mapping[str, str] = os.environ,
        by_itself: bool = False,
        **environment: str,
    ) -> None:
        environment = {**inherited, **environment}
        self.process: subprocess.Popen[str] = _start_with(environment, by_itself).Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def read_line(self) -> str:
        """The next line that it prints; empty if it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def ask(self, line: str) -> str:
        self.say(line)
        return self.read_line()

    def end(self) -> None:
        """Close its input; it must exit with 0."""
        self.process.communicate(timeout=600)
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=600)

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()


class Ordered(Child):
    """A program that takes orders, each ``[operation, argument]`` as a line of JSON, and answers in such lines."""

    def tell(self, operation: str, argument: Any = None) -> None:
        self.say(json.dumps([operation, argument]))

    def answer(self) -> Any:
        return json.loads(self.read_line())

    def does(self, operation: str, argument: Any = None) -> Any:
        self.tell(operation, argument)
        return self.answer()
