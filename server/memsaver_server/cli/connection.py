"""A connection for one command, and the exit codes with which errors end it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from memsaver_server.cli.options import Connection, ExitCode
from memsaver_server.cli.units import like
from memsaver_server.client import errors

if TYPE_CHECKING:
    from memsaver_server.client import Client

#: By the kind of a failure of a fleet's engine; by the class of the client's error if the kind has no entry.
_CODES: dict[str | type[errors.AnswerError], ExitCode] = {
    "unreachable": ExitCode.UNREACHABLE,
    "silent": ExitCode.UNREACHABLE,
    "hung": ExitCode.DEADLINE,
    "cannot_prepare": ExitCode.FAILED,
    errors.InvalidRequestError: ExitCode.INVALID,
    errors.UnauthorizedError: ExitCode.UNAUTHORIZED,
    errors.ConflictError: ExitCode.CONFLICT,
    errors.UnavailableError: ExitCode.NOT_NOW,
    errors.DeviceMemoryError: ExitCode.OUT_OF_MEMORY,
    errors.HostMemoryError: ExitCode.OUT_OF_MEMORY,
    errors.DrainDeadlineError: ExitCode.DEADLINE,
    errors.PhaseDeadlineError: ExitCode.DEADLINE,
}

_HINTS: dict[type[errors.ClientError], str] = {
    errors.UnreachableError: "Is the service running there? Set --url (MEMSAVER_URL) or --uds.",
    errors.UnauthorizedError: "Set --api-key or MEMSAVER_API_KEY.",
}


def exit_code(kind: str, status: int) -> ExitCode:
    """Return the exit code of a command that an error of this kind and status ends."""
    return _CODES.get(kind) or _CODES.get(errors.class_for(kind, status), ExitCode.FAILED)


def exit_code_for(error: errors.ClientError) -> ExitCode:
    return exit_code(error.kind, error.status) if isinstance(error, errors.AnswerError) else ExitCode.UNREACHABLE


@contextmanager
def connected(connection: Connection, *, as_json: bool = False) -> Iterator[Client]:
    """Yield a client. A ClientError inside ends the command with its message on stderr and its exit code."""
    from memsaver_server.client import Client

    try:
        made = Client(connection.url, uds=connection.uds, api_key=connection.api_key)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with made as client:
        try:
            yield client
        except errors.ClientError as error:
            body, status = (error.body, error.status) if isinstance(error, errors.AnswerError) else ({}, None)
            if as_json:
                typer.echo(json.dumps({"success": False, "message": str(error), **body, "status": status}, indent=2))
            else:  # what a coordinator says of its engines is not about the address and the key given here
                print_error(str(error), "" if "engines" in body else _HINTS.get(type(error), ""))
            raise typer.Exit(exit_code_for(error)) from error


def print_error(message: str, hint: str = "") -> None:
    """Print why a command fails on stderr, and what to do."""
    from rich.text import Text

    from memsaver_server.cli.tables import make_console, said

    console = make_console(stderr=True)
    console.print(Text.assemble(("memsaver: ", "bold red"), said(message)), soft_wrap=True)
    if hint:
        console.print(Text(f"  {hint}", style="dim"), soft_wrap=True)


@contextmanager
def sizes_as_asked(at_least: str | None) -> Iterator[None]:
    """Report what the tags hold in the unit in which ``--at-least`` was asked, if it is more than they hold."""
    try:
        yield
    except errors.AnswerError as error:
        if at_least is None or error.kind != "not_enough_to_release" or error.held_bytes is None:
            raise
        held = like(at_least, error.held_bytes)
        message = f"--at-least {at_least}: the tags hold {held} on the device; nothing was released"
        raise type(error)(error.status, message, error.body) from None
