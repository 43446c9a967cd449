"""``memsaver demo``."""

from __future__ import annotations

import time
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from memsaver_server.cli.connection import escape
from memsaver_server.cli.exit_codes import ExitCode
from memsaver_server.cli.tables import make_console, operation_view, status_view
from memsaver_server.cli.units import format_bytes, format_seconds
from memsaver_server.client import OccupationAnswer, OperationAnswer
from memsaver_server.demo import DemoError, run


def demo(context: typer.Context) -> None:
    """Start an engine on the GPU if there is one, else on the host driver; release, resume, compare the tokens.

    Options after -- go to the engine's `memsaver serve`, e.g. `memsaver demo -- --model DIR`.
    Exits with 0 if the tokens are equal, 1 on any failure.
    """
    console = make_console()
    try:
        with console.status("") as spinner:
            run(_Printer(console, spinner), context.args)
    except DemoError as error:
        console.print(f"[bold red]✗[/] {escape(str(error))}")
        raise typer.Exit(int(ExitCode.FAILED)) from error
    except KeyboardInterrupt:
        console.print("stopped", style="dim")
        raise typer.Exit(130) from None
    console.print("[green]✓[/] tokens equal before and after")


class _Printer:
    """Implements ``Show``."""

    def __init__(self, console: Console, spinner: Status) -> None:
        self._console = console
        self._spinner = spinner
        self._began = time.monotonic()

    def doing(self, step: str) -> None:
        self._spinner.update(f"{step} ...")

    def started(self, address: str, occupation: OccupationAnswer) -> None:
        where = ", ".join(device.name for device in occupation.devices) or occupation.driver
        held = format_bytes(sum(tag.resident_bytes for tag in occupation.tags))
        self._step(f"Engine ready after {format_seconds(time.monotonic() - self._began)} at {address}")
        self._console.print(f"  {where}; {held} in regions\n", markup=False)

    def generated(self, tokens: Sequence[int], text: str) -> None:
        self._step("Generate")
        shown = " ".join(map(str, tokens[:12]))
        self._console.print(f"  {len(tokens)} tokens: {shown}{' ...' if len(tokens) > 12 else ''}\n", markup=False)

    def operation(self, answer: OperationAnswer) -> None:
        self._step("Release" if answer.operation == "release" else "Resume")
        self._console.print(operation_view(answer))

    def refused(self, message: str) -> None:
        self._step("Generate while released")
        self._console.print(f"  503, retry later: {message}\n", markup=False)

    def occupation(self, answer: OccupationAnswer) -> None:
        self._step("Status")
        self._console.print(status_view(answer))
        self._console.print()

    def _step(self, text: str) -> None:
        self._console.print(Text(text, style="bold"))
