"""``memsaver watch`` and ``memsaver top``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from memsaver_server.cli.connection import connected
from memsaver_server.cli.options import DEFAULT_URL, ApiKey, Json, Uds, Url
from memsaver_server.cli.tables import make_console, plain, progress_line, state_text, status_view
from memsaver_server.cli.units import format_bytes, format_delta, format_seconds

if TYPE_CHECKING:
    from memsaver_server.client import Client, OperationStatusAnswer
    from memsaver_server.schemas import PhaseAnswer

_POLL_S = 0.25
_STATUS_STYLES = {"succeeded": "green", "failed": "bold red", "running": "yellow", "queued": "dim", "cancelled": "dim"}

Interval = Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between updates.", metavar="SECONDS")]


def watch(
    operation_id: Annotated[
        str | None, typer.Argument(help="One operation. Default: all new ones.", show_default=False)
    ] = None,
    url: Url = DEFAULT_URL,
    uds: Uds = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Follow operations phase by phase; ends with the operation, or with Ctrl-C.

    With --json each event is a line of JSON.
    """
    console = make_console()
    with connected(url, uds, api_key, as_json=as_json) as client:
        try:
            for operation in [operation_id] if operation_id else _new_operations(client):
                _follow(client, operation, console, as_json)
        except KeyboardInterrupt:
            raise typer.Exit from None


def top(url: Url = DEFAULT_URL, uds: Uds = None, api_key: ApiKey = None, interval: Interval = 1.0) -> None:
    """Show devices, tags and the latest operations, updated each second until Ctrl-C; once if piped."""
    console = make_console()
    with connected(url, uds, api_key) as client:
        if not console.is_terminal:
            console.print(_overview(client))
            return
        try:
            with Live(_overview(client), console=console, screen=True, auto_refresh=False) as live:
                while True:
                    time.sleep(interval)
                    live.update(_overview(client), refresh=True)
        except KeyboardInterrupt:
            raise typer.Exit from None


def _new_operations(client: Client) -> Iterator[str]:
    seen = {one.operation_id for one in client.operations() if one.status not in ("queued", "running", "prepared")}
    while True:
        new = [one.operation_id for one in reversed(client.operations()) if one.operation_id not in seen]
        seen.update(new)
        yield from new
        time.sleep(_POLL_S)


def _follow(client: Client, operation_id: str, console: Console, as_json: bool) -> None:
    from memsaver_server.schemas import PhaseAnswer, ProgressAnswer, StallAnswer

    if as_json:
        for event in client.events(operation_id):
            typer.echo(json.dumps({"operation_id": operation_id, "event": event.name, "data": event.data}))
        return
    about = client.operation(operation_id)
    asked = "all tags" if about.tags is None else " ".join(about.tags)
    console.print(
        Text.assemble((f"{about.operation} {operation_id}", "bold"), "  ", plain(asked), "  ", plain(about.client))
    )
    with console.status("") as spinner:
        for event in client.events(operation_id):
            if event.name == "phase":
                spinner.update(f"{event.data['name']} ...")
            elif event.name == "progress":
                spinner.update(progress_line(ProgressAnswer.model_validate(event.data)))
            elif event.name == "stalled":
                stall = StallAnswer.model_validate(event.data)
                spinner.update(f"{stall.phase}: no progress for {format_seconds(stall.seconds)}")
            elif event.name == "phase_done":
                console.print(_phase_line(PhaseAnswer.model_validate(event.data)))
    console.print(_outcome(client.operation(operation_id)))


def _phase_line(phase: PhaseAnswer) -> Text:
    line = Text(f"  {phase.name:<16}{format_seconds(phase.seconds):>10}")
    for device in phase.devices:
        line.append(f"{format_delta(device.delta_bytes):>12}", style="dim" if device.delta_bytes == 0 else "")
    return line


def _outcome(operation: OperationStatusAnswer) -> Text:
    message = operation.answer.message if operation.answer else operation.status
    good = operation.status == "succeeded"
    return Text.assemble(("  ✓ " if good else "  ✗ ", _STATUS_STYLES.get(operation.status, "")), plain(message))


def _overview(client: Client) -> RenderableType:
    occupation = client.occupation()
    operations = client.operations()
    parts: list[RenderableType] = [
        Text.assemble(("memsaver ", "bold"), client.address, (f"   {datetime.now():%H:%M:%S}", "dim"))
    ]
    for device in occupation.devices:
        bar = ProgressBar(device.total_bytes or 1, device.used_bytes, width=40)
        share = f"{format_bytes(device.used_bytes)} of {format_bytes(device.total_bytes)}"
        parts.append(_line(f"device {device.index}", bar, share))
    parts.append(status_view(occupation))
    running = next((one for one in operations if one.status in ("running", "prepared")), None)
    if running is not None:
        parts.append(_running_line(running))
    if operations:
        parts += ["", _operations_table(operations[:10])]
    return Group(*parts)


def _running_line(operation: OperationStatusAnswer) -> RenderableType:
    progress = operation.progress
    state = state_text("releasing" if operation.operation == "release" else "resuming")
    cells: list[RenderableType] = [state, Text(operation.phase, style="bold")]
    if progress and progress.total_bytes:
        cells += [ProgressBar(progress.total_bytes, progress.done_bytes, width=40), progress_line(progress)]
    return _line(*cells)


def _line(*cells: RenderableType) -> Table:
    line = Table.grid(padding=(0, 1))
    line.add_row(*cells)
    return line


def _operations_table(operations: list[OperationStatusAnswer]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("at", "operation", "tags", "outcome", "time", "client"):
        table.add_column(name, no_wrap=True, justify="right" if name == "time" else "left")
    for one in operations:
        table.add_row(
            f"{datetime.fromtimestamp(one.created_at):%H:%M:%S}",
            one.operation,
            plain("all" if one.tags is None else " ".join(one.tags)),
            Text(one.status, style=_STATUS_STYLES.get(one.status, "")),
            format_seconds(one.seconds),
            plain(one.client),
        )
    return table
