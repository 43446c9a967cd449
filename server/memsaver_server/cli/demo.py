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
from memsaver_server.demo import DemoError, Show, run


def demo(context: typer.Context) -> None:
    """Start an engine on the GPU if there is one, else on the host driver; release, resume, compare the tokens.

    Options after -- go to the engine's `memsaver serve`, e.g. `memsaver demo -- --model DIR`.
    Exits with 0 if the tokens are equal, 1 on any failure.
    """
    console = make_console()
    began = time.monotonic()
    try:
        with console.status("") as spinner:
            run(_show(console, spinner, began), context.args)
    except DemoError as error:
        console.print(f"[bold red]✗[/] {escape(str(error))}")
        raise typer.Exit(int(ExitCode.FAILED)) from error
    except KeyboardInterrupt:
        console.print("stopped", style="dim")
        raise typer.Exit(130) from None
    console.print("[green]✓[/] tokens equal before and after")


def _show(console: Console, spinner: Status, began: float) -> Show:
    def doing(what: str) -> None:
        spinner.update(f"{what} ...")

    def step(text: str) -> None:
        console.print(Text(text, style="bold"))

    def started(address: str, occupation: OccupationAnswer) -> None:
        where = ", ".join(device.name for device in occupation.devices) or occupation.driver
        held = format_bytes(sum(tag.resident_bytes for tag in occupation.tags))
        step(f"Engine ready after {format_seconds(time.monotonic() - began)} at {address}")
        console.print(f"  {where}; {held} in regions\n", markup=False)

    def generated(tokens: Sequence[int], text: str) -> None:
        step("Generate")
        shown = " ".join(map(str, tokens[:12]))
        console.print(f"  {len(tokens)} tokens: {shown}{' ...' if len(tokens) > 12 else ''}\n", markup=False)

    def operation(answer: OperationAnswer) -> None:
        step("Release" if answer.operation == "release" else "Resume")
        console.print(operation_view(answer))

    def refused(message: str) -> None:
        step("Generate while released")
        console.print(f"  503, retry later: {message}\n", markup=False)

    def occupation(answer: OccupationAnswer) -> None:
        step("Status")
        console.print(status_view(answer))
        console.print()

    return Show(doing, started, generated, operation, refused, occupation)
