"""A connection for one command, and the exit codes with which errors end it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from memsaver_server.cli.options import Connection, ExitCode
from memsaver_server.cli.units import like, parse_size
from memsaver_server.client.errors import AnswerError, ClientError

if TYPE_CHECKING:
    from memsaver_server.client import Client

#: By the kind of an error; by its HTTP status if the kind has no entry. Other statuses from 400 to 499 are INVALID.
_CODES: dict[str | int, ExitCode] = {
    "unreachable": ExitCode.UNREACHABLE,
    "silent": ExitCode.UNREACHABLE,
    "out_of_device_memory": ExitCode.OUT_OF_MEMORY,
    "drain_timeout": ExitCode.DEADLINE,
    "phase_timeout": ExitCode.DEADLINE,
    "hung": ExitCode.DEADLINE,
    "cancelled": ExitCode.FAILED,
    "cannot_prepare": ExitCode.FAILED,
    401: ExitCode.UNAUTHORIZED,
    403: ExitCode.UNAUTHORIZED,
    409: ExitCode.CONFLICT,
    503: ExitCode.NOT_NOW,
    507: ExitCode.OUT_OF_MEMORY,
}

_HINTS = {
    ExitCode.UNREACHABLE: "Is the service running there? Set --url (MEMSAVER_URL) or --uds.",
    ExitCode.UNAUTHORIZED: "Set --api-key or MEMSAVER_API_KEY.",
}


def exit_code(kind: str, status: int) -> ExitCode:
    """Return the exit code of a command that an error of this kind and status ends."""
    fallback = ExitCode.INVALID if 400 <= status < 500 else ExitCode.FAILED
    return _CODES.get(kind) or _CODES.get(status, fallback)


def exit_code_for(error: ClientError) -> ExitCode:
    return exit_code(error.kind, error.status) if isinstance(error, AnswerError) else ExitCode.UNREACHABLE


@contextmanager
def connected(connection: Connection, *, as_json: bool = False) -> Iterator[Client]:
    """Yield a client. A ClientError inside ends the command with its message on stderr and its exit code."""
    from memsaver_server.client import Client

    try:
        made = Client(connection.url, uds=connection.uds or None, api_key=connection.api_key or None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with made as client:
        try:
            yield client
        except ClientError as error:
            code = exit_code_for(error)
            if as_json:
                body, status = (error.body, error.status) if isinstance(error, AnswerError) else ({}, None)
                typer.echo(json.dumps({"success": False, "message": str(error), **body, "status": status}, indent=2))
            else:
                print_error(str(error), _HINTS.get(code, ""))
            raise typer.Exit(int(code)) from error


def print_error(message: str, hint: str = "") -> None:
    """Print why a command fails on stderr, and what to do."""
    from rich.text import Text

    from memsaver_server.cli.tables import make_console, plain

    console = make_console(stderr=True)
    console.print(Text.assemble(("memsaver: ", "bold red"), plain(message)), soft_wrap=True)
    if hint:
        console.print(Text(f"  {hint}", style="dim"), soft_wrap=True)


def size_of(text: str | None) -> int | None:
    """Return the bytes of an option's value; raise BadParameter if it is not a size, or not more than 0."""
    try:
        count = None if text is None else parse_size(text)
        if count == 0:
            raise ValueError(f"{text!r} is no memory; write for example 8GiB, 500MB or a number of bytes")
        return count
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def sizes_as_asked(at_least: str | None) -> Iterator[None]:
    """Report what the tags hold in the unit in which ``--at-least`` was asked, if it is more than they hold."""
    try:
        yield
    except AnswerError as error:
        if at_least is None or error.kind != "not_enough_to_release" or error.held_bytes is None:
            raise
        held = like(at_least, error.held_bytes)
        message = f"--at-least {at_least}: the tags hold {held} on the device; nothing was released"
        raise type(error)(error.status, message, error.body) from None
