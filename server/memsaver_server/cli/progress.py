"""A progress bar for a long call, on stderr and only on a terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from memsaver_server.cli.tables import make_console, progress_line
from memsaver_server.client import ClientError

if TYPE_CHECKING:
    from memsaver_server.client import Client, OperationStatusAnswer

ResultT = TypeVar("ResultT")

#: Delay before the bar is drawn, seconds. Most operations end earlier.
_DELAY_S = 0.4
_REFRESH_S = 0.15


def while_running(client: Client, verb: str, call: Callable[[], ResultT]) -> ResultT:
    """Return what ``call`` returns; show the service's progress figures meanwhile."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        return call()
    future: Future[ResultT] = Future()
    # A daemon, so that Ctrl-C ends the command at once; the operation continues in the service.
    threading.Thread(target=_settle, args=(future, call), name=f"memsaver-{verb}", daemon=True).start()
    wait([future], _DELAY_S)
    if not future.done():
        _draw_until_done(client, verb, future, console)
    return future.result()


def _settle(future: Future[ResultT], call: Callable[[], ResultT]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def _draw_until_done(client: Client, verb: str, future: Future[ResultT], console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(verb, total=None, note="")
        while wait([future], _REFRESH_S).not_done:
            running = _running(client, verb)
            if running is None:
                continue
            progress = running.progress
            bar.update(
                task,
                description=f"{verb}: {running.phase}" if running.phase else verb,
                total=progress.total_bytes if progress and progress.total_bytes else None,
                completed=progress.done_bytes if progress else 0,
                note=progress_line(progress) if progress and progress.total_bytes else "",
            )


def _running(client: Client, verb: str) -> OperationStatusAnswer | None:
    try:
        operations = client.operations()
    except ClientError:
        return None  # the operation's own answer will tell
    return next((one for one in operations if one.operation == verb and one.status == "running"), None)
