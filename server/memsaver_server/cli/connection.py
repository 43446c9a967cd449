"""A connection for one command, and the exit codes with which errors end it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from memsaver_server.cli.options import ExitCode
from memsaver_server.cli.units import like, parse_size
from memsaver_server.client import errors
from memsaver_server.client.errors import AnswerError, ClientError, UnreachableError

if TYPE_CHECKING:
    from memsaver_server.client import Client

_BY_ERROR: dict[type[ClientError], ExitCode] = {
    errors.UnreachableError: ExitCode.UNREACHABLE,
    errors.InvalidRequestError: ExitCode.INVALID,
    errors.UnauthorizedError: ExitCode.UNAUTHORIZED,
    errors.ConflictError: ExitCode.CONFLICT,
    errors.DeviceMemoryError: ExitCode.OUT_OF_MEMORY,  # before its base, UnavailableError
    errors.HostMemoryError: ExitCode.OUT_OF_MEMORY,
    errors.DrainDeadlineError: ExitCode.DEADLINE,
    errors.PhaseDeadlineError: ExitCode.DEADLINE,
    errors.UnavailableError: ExitCode.NOT_NOW,
}


def exit_code_for(error: ClientError) -> ExitCode:
    """Return the exit code of a command that ``error`` ends."""
    return next((code for kind, code in _BY_ERROR.items() if isinstance(error, kind)), ExitCode.FAILED)


@contextmanager
def connected(url: str, uds: str | None, api_key: str | None, *, as_json: bool = False) -> Iterator[Client]:
    """Yield a client. A ClientError inside ends the command with its message on stderr and its exit code."""
    from memsaver_server.client import Client

    try:
        connection = Client(url, uds=uds or None, api_key=api_key or None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with connection as client:
        try:
            yield client
        except ClientError as error:
            raise failure(error, as_json=as_json) from error


def failure(error: ClientError, *, as_json: bool = False) -> typer.Exit:
    """Print ``error`` and return the exit with its code."""
    code = exit_code_for(error)
    if as_json:
        body = dict(error.body) if isinstance(error, AnswerError) else {}
        status = error.status if isinstance(error, AnswerError) else None
        typer.echo(json.dumps({"success": False, "message": str(error), **body, "status": status}, indent=2))
    else:
        print_error(str(error), _hint(error))
    return typer.Exit(int(code))


def print_error(message: str, hint: str = "") -> None:
    """Print why a command fails on stderr, and what to do."""
    from rich.text import Text

    from memsaver_server.cli.tables import make_console, plain

    console = make_console(stderr=True)
    console.print(Text.assemble(("memsaver: ", "bold red"), plain(message)), soft_wrap=True)
    if hint:
        console.print(Text(f"  {hint}", style="dim"), soft_wrap=True)


def size_of(text: str | None) -> int | None:
    """Return the bytes of an option's value.

    Raises:
        BadParameter: it is not a size, or not more than 0.
    """
    try:
        count = None if text is None else parse_size(text)
        if count == 0:
            raise ValueError(f"{text!r} is no memory; write for example 8GiB, 500MB or a number of bytes")
        return count
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def sizes_as_asked(at_least: str | None) -> Iterator[None]:
    """Tell what the tags hold in the unit in which ``--at-least`` was asked, if it is more than they hold."""
    try:
        yield
    except AnswerError as error:
        if at_least is None or error.kind != "not_enough_to_release" or error.held_bytes is None:
            raise
        held = like(at_least, error.held_bytes)
        message = f"--at-least {at_least}: the tags hold {held} on the device; nothing was released"
        raise type(error)(error.status, message, error.body) from None


def _hint(error: ClientError) -> str:
    if isinstance(error, UnreachableError):
        return "Is the service running there? Set --url (MEMSAVER_URL) or --uds."
    if exit_code_for(error) is ExitCode.UNAUTHORIZED:
        return "Set --api-key or MEMSAVER_API_KEY."
    return ""
