"""Python programs as child processes: run to their end, or in a dialogue line by line."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from typing import TypeVar

Own = TypeVar("Own", bound="Child")


def run_python(
    code: str, *arguments: str, inherited: Mapping[str, str] = os.environ, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with success or not."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**inherited, **environment},
    )


def output_of(code: str, *arguments: str, inherited: Mapping[str, str] = os.environ, **environment: str) -> str:
    """The output of a program that must succeed; if not, fails with its output."""
    ran = run_python(code, *arguments, inherited=inherited, **environment)
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


class Child:
    """A program with which a test exchanges lines; its arguments are the interpreter's."""

    def __init__(self, *arguments: str, inherited: Mapping[str, str] = os.environ, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, **environment},
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
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=60)

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()
