"""Operations while they run: ``memsaver watch``, ``memsaver top``, and those that a command has started."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from memsaver_server.cli import tables
from memsaver_server.cli.connection import connected, exit_code_for
from memsaver_server.cli.options import Connection, ExitCode, Interval, Json, grouped
from memsaver_server.cli.units import format_bytes, format_delta, format_seconds
from memsaver_server.client.errors import ClientError, error_for

if TYPE_CHECKING:
    from memsaver_core.contract.reports import PhaseReport, PreparedAnswer
    from memsaver_server.client import AcceptedAnswer, Client, OperationAnswer, OperationStatusAnswer
    from memsaver_server.client.errors import AnswerError

_POLL_S = 0.25
#: The first interval at which a started operation is polled, which doubles up to the longest, seconds.
_FIRST_S, _LONGEST_S = 0.01, 0.15
#: Delay before its progress is drawn, seconds. Most operations end earlier.
_DRAWN_AFTER_S = 0.4


@grouped
def watch(
    operation_id: Annotated[
        str | None, typer.Argument(help="One operation. Default: all new ones.", show_default=False)
    ] = None,
    *,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Follow operations phase by phase; ends with the operation, and its exit code, or with Ctrl-C.

    With --json each event is a line of JSON.
    """
    console = tables.make_console()
    with connected(connection, as_json=as_json) as client:
        try:
            if operation_id:
                raise typer.Exit(_follow(client, operation_id, console, as_json))
            for operation in _new_operations(client):
                _follow(client, operation, console, as_json)
        except KeyboardInterrupt:
            raise typer.Exit from None


@grouped
def top(connection: Connection, interval: Interval = 1.0) -> None:
    """Show devices, tags and the latest operations, updated each second until Ctrl-C; once if piped."""
    console = tables.make_console()
    with connected(connection) as client:
        if not console.is_terminal:
            console.print(_overview(client))
            raise typer.Exit(ExitCode.OK if tables.all_answer(client.occupation()) else ExitCode.UNREACHABLE)
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


def _follow(client: Client, operation_id: str, console: Console, as_json: bool) -> ExitCode:
    """Show an operation until it has ended; return the exit code of a command that had waited for it."""
    from memsaver_core.contract.reports import PhaseReport, ProgressAnswer, Stall

    if as_json:
        for event in client.events(operation_id):
            typer.echo(json.dumps({"operation_id": operation_id, "event": event.name, "data": event.data}))
        return _exit_code(client.operation(operation_id))
    about = client.operation(operation_id)
    asked = "all tags" if about.tags is None else " ".join(about.tags)
    head = (f"{about.operation} {operation_id}", "bold")
    console.print(Text.assemble(head, "  ", tables.plain(asked), "  ", tables.plain(about.client)))
    with console.status("") as spinner:
        for event in client.events(operation_id):
            if event.name == "phase":
                spinner.update(f"{event.data['name']} ...")
            elif event.name == "progress":
                spinner.update(tables.progress_line(ProgressAnswer.model_validate(event.data)))
            elif event.name == "stalled":
                stall = Stall.model_validate(event.data)
                spinner.update(f"{stall.phase}: no progress for {format_seconds(stall.seconds)}")
            elif event.name == "phase_done":
                console.print(_phase_line(PhaseReport.model_validate(event.data)))
    ended = client.operation(operation_id)
    console.print(outcome_view(ended))
    return _exit_code(ended)


def _exit_code(ended: OperationStatusAnswer) -> ExitCode:
    return ExitCode.OK if ended.status == "succeeded" else exit_code_for(_failure(ended))


def _failure(ended: OperationStatusAnswer) -> AnswerError:
    """Return the error that its callers got."""
    body = ended.answer.model_dump() if ended.answer else {}
    return error_for(body.get("error", {}).get("status", 500), body, "", None)


def _phase_line(phase: PhaseReport) -> Text:
    line = Text(f"  {phase.name:<16}{format_seconds(phase.seconds):>10}")
    for device in phase.devices:
        line.append(f"{format_delta(device.delta_bytes):>12}", style="dim" if device.delta_bytes == 0 else "")
    return line


def outcome_view(operation: OperationStatusAnswer, wanted: str = "succeeded") -> Text:
    """Return how an operation ended, as a success if its status is the one that is ``wanted``."""
    message = operation.answer.message if operation.answer else operation.status
    mark = ("  ✓ ", "green") if operation.status == wanted else ("  ✗ ", tables.state_text(operation.status).style)
    return Text.assemble(mark, tables.said(message))


def _overview(client: Client) -> RenderableType:
    occupation, operations = client.occupation(), client.operations()
    now = (f"   {datetime.now():%H:%M:%S}", "dim")
    parts: list[RenderableType] = [Text.assemble(("memsaver ", "bold"), client.address, now)]
    for device in occupation.devices:
        bar = ProgressBar(device.total_bytes or 1, device.used_bytes, width=40)
        share = f"{format_bytes(device.used_bytes)} of {format_bytes(device.total_bytes)}"
        parts.append(_line(f"device {device.index}", bar, share))
    parts.append(tables.status_view(occupation))
    running = next((one for one in operations if one.status in ("running", "prepared")), None)
    if running is not None:
        parts.append(_running_line(running))
    if operations:
        parts += ["", _operations_table(operations[:10])]
    return Group(*parts)


def _running_line(operation: OperationStatusAnswer) -> RenderableType:
    progress = operation.progress
    state = tables.state_text("releasing" if operation.operation == "release" else "resuming")
    cells: list[RenderableType] = [state, Text(operation.phase or operation.status, style="bold")]
    if progress and progress.total_bytes:
        cells += [ProgressBar(progress.total_bytes, progress.done_bytes, width=40), tables.progress_line(progress)]
    return _line(*cells, format_seconds(operation.seconds))


def _line(*cells: RenderableType) -> Table:
    line = Table.grid(padding=(0, 1))
    line.add_row(*cells)
    return line


def _operations_table(operations: Iterable[OperationStatusAnswer]) -> Table:
    def cells(one: OperationStatusAnswer) -> list[tables.Cell]:
        tags, at = "all" if one.tags is None else " ".join(one.tags), datetime.fromtimestamp(one.created_at)
        state, took = tables.state_text(one.status), format_seconds(one.seconds)
        return [f"{at:%H:%M:%S}", one.operation, tags, state, took, one.client]

    return tables.table_of(["at", "operation", "tags", "outcome", ">time", "client"], map(cells, operations))


def until_ended(client: Client, start: Callable[[], AcceptedAnswer]) -> OperationAnswer:
    """Start an operation by ``start`` and return its answer. Raises AnswerError if it failed or stalls, as the
    synchronous call would, typer.Exit if Ctrl-C was pressed: stderr says what became of the operation."""
    accepted = None
    try:
        with _interrupt_held():
            accepted = start()
        return _poll(client, accepted)
    except KeyboardInterrupt:
        if accepted is not None:
            _say_cancelled(client, accepted.operation_id)
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def until_prepared(
    client: Client, prepare: Callable[[], PreparedAnswer], start: Callable[[], AcceptedAnswer]
) -> PreparedAnswer:
    """Return the answer of ``prepare``; ``start`` is the same call, with the same key, in the background. Raises as
    ``until_ended``: Ctrl-C leaves nothing prepared."""
    try:
        return prepare()
    except KeyboardInterrupt:  # the call, or its answer, may still be on its way
        _say_cancelled(client, start().operation_id)
        raise typer.Exit(ExitCode.INTERRUPTED) from None


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Hold back the first KeyboardInterrupt until the end of the block, in which the service is called."""
    pressed, before = False, signal.getsignal(signal.SIGINT)

    def note(_number: int, _frame: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and before is signal.default_int_handler:  # else it was ignored
        raise KeyboardInterrupt


def _poll(client: Client, accepted: AcceptedAnswer) -> OperationAnswer:
    from memsaver_server.client import OperationAnswer

    console = tables.make_console(stderr=True)
    live = Live(console=console, transient=True, auto_refresh=False)
    draws_at, interval = time.monotonic() + _DRAWN_AFTER_S, _FIRST_S
    try:
        while True:
            with _interrupt_held():  # a connection that was interrupted may not be used again
                now = client.operation(accepted.operation_id)
                if now.answer is None:
                    _check_stall(client, now)
            if isinstance(now.answer, OperationAnswer):
                return now.answer
            if now.answer is not None:
                raise _failure(now)
            if console.is_terminal and time.monotonic() >= draws_at:
                live.start()
                live.update(_running_line(now), refresh=True)
            time.sleep(interval)
            interval = min(2 * interval, _LONGEST_S)
    finally:
        live.stop()


def _check_stall(client: Client, now: OperationStatusAnswer) -> None:
    """Raise PhaseDeadlineError if the operation, or the one that it waits for, makes no progress."""
    running = now
    if now.status == "queued":
        running = next((one for one in client.operations() if one.status == "running"), now)
    if running.stalled is not None:
        message = (
            f"{running.operation} {running.operation_id} has made no progress in phase {running.stalled.phase!r} for "
            f"{running.stalled.seconds:.0f} s. It continues; memsaver watch {running.operation_id} follows it"
        )
        raise error_for(504, {"message": message, "error": {"type": "phase_timeout"}}, "", None)


def _say_cancelled(client: Client, operation_id: str) -> None:
    """Cancel the operation unless other callers wait for it, too; stderr says what became of it."""
    try:
        now = client.operation(operation_id)
        said = f"{now.operation} {operation_id} answers other calls, too, and continues"
        if now.callers == 1:
            ended = client.cancel(operation_id)
            said = ended.answer.message if ended.answer else ended.status
    except ClientError as error:
        said = str(error)
    typer.echo(f"memsaver: {said}", err=True)
