"""The demonstration: one engine in a process of its own, released and resumed over HTTP, its tokens compared."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TextIO

from memsaver_server.client import Client, ClientError, OccupationAnswer, OperationAnswer, UnavailableError

PROMPT = "Memory that nobody uses"
NEW_TOKENS = 32

_ADDRESS = re.compile(r"(https?|unix)://\S+")
_START_S = 600.0
_STOP_S = 30.0


class DemoError(Exception):
    """A step of the demonstration failed; the message says which and how."""


class Show(Protocol):
    """Receives the steps of the demonstration."""

    def doing(self, step: str) -> None:
        """``step`` begins, and may take a while."""

    def started(self, address: str, occupation: OccupationAnswer) -> None: ...

    def generated(self, tokens: Sequence[int], text: str) -> None: ...

    def operation(self, answer: OperationAnswer) -> None: ...

    def refused(self, message: str) -> None:
        """A request during the release was refused with ``message``."""

    def occupation(self, answer: OccupationAnswer) -> None: ...


def run(show: Show, serve_options: Sequence[str] = ()) -> None:
    """Start an engine, generate, release, resume, generate again, compare the tokens and end the engine.

    Args:
        serve_options: further options for ``memsaver serve``.

    Raises:
        DemoError: a step failed, or the tokens differ.
    """
    show.doing("starting an engine")
    with _engine(serve_options) as url, Client(url) as client:
        try:
            _steps(client, show)
        except ClientError as error:
            raise DemoError(str(error)) from error


def _steps(client: Client, show: Show) -> None:
    show.started(client.address, client.occupation())
    before = _generate(client, show)

    show.doing("releasing")
    released = client.release()
    show.operation(released)
    if released.enabled and released.released_bytes == 0:
        raise DemoError("the release freed no memory")
    try:
        client.generate(PROMPT, max_new_tokens=1, temperature=0.0)
    except UnavailableError as refusal:
        show.refused(str(refusal))
    else:
        if released.enabled:
            raise DemoError("the engine generated while its memory was released")
    show.occupation(client.occupation())

    show.doing("resuming")
    show.operation(client.resume())
    after = _generate(client, show)
    if after != before:
        raise DemoError(f"the tokens differ: {list(before)} before, {list(after)} after")


def _generate(client: Client, show: Show) -> Sequence[int]:
    show.doing("generating")
    answer = client.generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    tokens = [int(token) for token in answer["output_ids"]]
    if not tokens:
        raise DemoError("the engine generated no tokens")
    show.generated(tokens, str(answer.get("text", "")))
    return tokens


@contextmanager
def _engine(serve_options: Sequence[str]) -> Iterator[str]:
    """Run ``memsaver serve`` as a child process during the block; yields its address."""
    environment = {key: value for key, value in os.environ.items() if key != "MEMSAVER_API_KEY"}
    command = [sys.executable, "-m", "memsaver_server.cli", "serve", "--port", "0", *serve_options]
    with tempfile.TemporaryFile("w+") as log:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            yield _address_of(child, log)
        finally:
            code = _stop(child)
        if code != 0:
            raise DemoError(f"the engine ended with exit code {code}:\n{_tail(log)}")


def _address_of(child: subprocess.Popen[str], log: TextIO) -> str:
    assert child.stdout is not None
    timeout = threading.Timer(_START_S, child.kill)
    timeout.start()
    try:
        line = child.stdout.readline()
    finally:
        timeout.cancel()
    match = _ADDRESS.search(line)
    if match is None:
        child.wait()
        raise DemoError(f"the engine did not start (exit code {child.returncode}):\n{_tail(log)}")
    return match.group()


def _stop(child: subprocess.Popen[str]) -> int:
    child.send_signal(signal.SIGTERM)
    try:
        return child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _tail(log: TextIO, lines: int = 20) -> str:
    log.seek(0)
    return "".join(log.readlines()[-lines:]).rstrip() or "(it wrote nothing)"
