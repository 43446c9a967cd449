"""``memsaver demo``: one engine in a child process, released and resumed over HTTP, its tokens compared."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import typer
from rich.console import Console, Group, RenderableType
from rich.status import Status
from rich.text import Text

from memsaver_server.cli.options import ExitCode
from memsaver_server.cli.tables import make_console, operation_view, plain, status_view
from memsaver_server.cli.units import format_bytes, format_seconds
from memsaver_server.client import ClientError, UnavailableError

if TYPE_CHECKING:
    from memsaver_server.client import Client

PROMPT = "Memory that nobody uses"
NEW_TOKENS = 32

_ADDRESS = re.compile(r"(https?|unix)://\S+")
_START_S = 600.0
_STOP_S = 30.0


class DemoError(Exception):
    """A step of the demonstration failed; the message says which and how."""


def demo(context: typer.Context) -> None:
    """Start an engine on the GPU if there is one, else on the host driver; release, resume, compare the tokens.

    Options after -- go to the engine's `memsaver serve`, e.g. `memsaver demo -- --model DIR`.
    Exits with 0 if the tokens are equal, 1 on any failure.
    """
    from memsaver_server.client import Client

    console = make_console()
    try:
        with console.status("starting an engine ...") as spinner:
            began = time.monotonic()
            with _engine(context.args) as url, Client(url) as client:
                ready = f"Engine ready after {format_seconds(time.monotonic() - began)} at {client.address}"
                console.print(Text(ready, style="bold"))
                _run(client, console, spinner)
    except (DemoError, ClientError) as error:
        console.print(Text.assemble(("✗ ", "bold red"), plain(str(error))))
        raise typer.Exit(ExitCode.FAILED) from error
    except KeyboardInterrupt:
        console.print("stopped", style="dim")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    console.print("[green]✓[/] tokens equal before and after")


def _run(client: Client, console: Console, spinner: Status) -> None:
    """Generate, release, resume, generate again; raise DemoError if the tokens differ, ClientError if a call fails."""

    def show(title: str, what: RenderableType) -> None:
        console.print(Text(title, style="bold"))
        console.print(what, markup=False)

    def generate() -> list[int]:
        spinner.update("generating ...")
        answer = client.generate(PROMPT, max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        tokens = [int(token) for token in answer["output_ids"]]
        if not tokens:
            raise DemoError("the engine generated no tokens")
        shown = " ".join(map(str, tokens[:12]))
        show("Generate", f"  {len(tokens)} tokens: {shown}{' ...' if len(tokens) > 12 else ''}\n")
        return tokens

    occupation = client.occupation()
    where = ", ".join(device.name for device in occupation.devices) or occupation.driver
    held = format_bytes(sum(tag.resident_bytes for tag in occupation.tags))
    console.print(f"  {where}; {held} in regions\n", markup=False)
    before = generate()

    spinner.update("releasing ...")
    released = client.release()
    show("Release", operation_view(released))
    if released.enabled and released.released_bytes == 0:
        raise DemoError("the release freed no memory")
    try:
        client.generate(PROMPT, max_new_tokens=1, temperature=0.0)
    except UnavailableError as refusal:
        show("Generate while released", f"  503, retry later: {refusal}\n")
    else:
        if released.enabled:
            raise DemoError("the engine generated while its memory was released")
    show("Status", Group(status_view(client.occupation()), ""))

    spinner.update("resuming ...")
    show("Resume", operation_view(client.resume()))
    after = generate()
    if after != before:
        raise DemoError(f"the tokens differ: {before} before, {after} after")


@contextmanager
def _engine(serve_options: Sequence[str]) -> Iterator[str]:
    """Run ``memsaver serve`` as a child process during the block; yields its address."""
    from memsaver_server.reference import PYTHON  # no other command needs the engine

    environment = {key: value for key, value in os.environ.items() if key != "MEMSAVER_API_KEY"}
    command = [*PYTHON, "-m", "memsaver_server.cli", "serve", "--port", "0", *serve_options]
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


def _tail(log: TextIO) -> str:
    log.seek(0)
    return "".join(log.readlines()[-20:]).rstrip() or "(it wrote nothing)"
