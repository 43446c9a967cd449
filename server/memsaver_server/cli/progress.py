"""Starts and follows a release or resume: a progress bar on stderr, on a terminal only. Ctrl-C cancels it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from memsaver_server.cli.options import ExitCode
from memsaver_server.cli.tables import make_console, progress_line
from memsaver_server.client.errors import ClientError, PhaseDeadlineError, error_for

if TYPE_CHECKING:
    from memsaver_server.client import AcceptedAnswer, Client, OperationAnswer, OperationStatusAnswer

#: Delay before the bar is drawn, seconds. Most operations end earlier.
_DELAY_S = 0.4
#: The first interval at which the operation is asked for, which doubles up to the longest, seconds.
_FIRST_S, _LONGEST_S = 0.01, 0.15


def until_ended(client: Client, start: Callable[[], AcceptedAnswer]) -> OperationAnswer:
    """Start an operation by ``start`` and return its answer.

    Raises:
        AnswerError: it failed or stalls, as the synchronous call would.
        typer.Exit: Ctrl-C was pressed; stderr says what became of the operation.
    """
    accepted = None
    try:
        with _interrupt_held():
            accepted = start()
        with ExitStack() as drawn:
            return _poll(client, accepted, drawn)
    except KeyboardInterrupt:
        if accepted is not None:
            typer.echo(f"memsaver: {_cancel(client, accepted.operation_id)}", err=True)
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None


@contextmanager
def _interrupt_held() -> Iterator[None]:
    """Raise the first KeyboardInterrupt at the end of the block, since the service may have begun what it asks for.

    The second is raised at once.
    """
    pressed = False

    def hold(_number: int, _frame: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed and before is signal.default_int_handler:  # else it was ignored
        raise KeyboardInterrupt


def _poll(client: Client, accepted: AcceptedAnswer, drawn: ExitStack) -> OperationAnswer:
    from memsaver_server.client import OperationAnswer

    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False)
    task: TaskID | None = None
    draws_at = time.monotonic() + _DELAY_S
    interval = _FIRST_S
    while True:
        now = client.operation(accepted.operation_id)
        if isinstance(now.answer, OperationAnswer):
            return now.answer
        if now.answer is not None:
            body = now.answer.model_dump()
            raise error_for(body["error"].get("status", 500), body, "", None)
        _check_stall(client, now)
        if task is None and console.is_terminal and time.monotonic() >= draws_at:
            drawn.enter_context(bar)
            task = bar.add_task(accepted.operation, total=None, note="")
        if task is not None:
            _draw(bar, task, now)
        time.sleep(interval)
        interval = min(2 * interval, _LONGEST_S)


def _draw(bar: Progress, task: TaskID, now: OperationStatusAnswer) -> None:
    progress = now.progress
    bar.update(
        task,
        description=f"{now.operation}: {now.phase or now.status}",
        total=progress.total_bytes if progress and progress.total_bytes else None,
        completed=progress.done_bytes if progress else 0,
        note=progress_line(progress) if progress and progress.total_bytes else "",
        refresh=True,
    )


def _check_stall(client: Client, now: OperationStatusAnswer) -> None:
    """Raise PhaseDeadlineError if the operation, or the one that it waits for, makes no progress."""
    running = (
        next((one for one in client.operations() if one.status == "running"), now) if now.status == "queued" else now
    )
    if running.stalled is not None:
        raise PhaseDeadlineError(
            504,
            f"{running.operation} {running.operation_id} has made no progress in phase {running.stalled.phase!r} for "
            f"{running.stalled.seconds:.0f} s. It continues; memsaver watch {running.operation_id} follows it",
        )


def _cancel(client: Client, operation_id: str) -> str:
    """Cancel the operation unless other callers wait for it, too; return what became of it."""
    try:
        now = client.operation(operation_id)
        if now.callers > 1:
            return f"{now.operation} {operation_id} answers other calls, too, and continues"
        ended = client.cancel(operation_id)
    except ClientError as error:
        return str(error)
    return ended.answer.message if ended.answer else ended.status
