"""The options of commands that connect to a service, and the exit codes with which errors end a command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Annotated

import typer

from memsaver_server.cli.tables import make_console
from memsaver_server.cli.units import parse_size
from memsaver_server.client import AnswerError, Client, ClientError, UnreachableError, errors

Url = Annotated[
    str,
    typer.Option(
        "--url", envvar="MEMSAVER_URL", help="Address of the service: http://host:port or unix:///path.", metavar="URL"
    ),
]
Uds = Annotated[str | None, typer.Option("--uds", help="Unix socket of the service, instead of --url.", metavar="PATH")]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", envvar="MEMSAVER_API_KEY", help="Key of the service.", metavar="KEY", show_envvar=True),
]
Json = Annotated[bool, typer.Option("--json", help="Print the service's JSON instead of tables.")]
Tags = Annotated[
    list[str] | None, typer.Argument(help="Tags, e.g. weights kv_cache. Default: all.", show_default=False)
]


class ExitCode(IntEnum):
    """The exit codes; 2 is also that of a wrong option or argument."""

    OK = 0
    FAILED = 1
    INVALID = 2
    UNREACHABLE = 3
    UNAUTHORIZED = 4
    CONFLICT = 5
    OUT_OF_MEMORY = 6
    DEADLINE = 7
    NOT_NOW = 8
    INTERRUPTED = 130


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
        console = make_console(stderr=True)
        console.print(f"[bold red]memsaver:[/] {escape(str(error))}")
        hint = _hint(error)
        if hint:
            console.print(f"  {hint}", style="dim")
    return typer.Exit(int(code))


def size_of(text: str | None) -> int | None:
    """Return the bytes of an option's value."""
    try:
        return parse_size(text) if text else None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def escape(text: str) -> str:
    """Escape brackets, which rich reads as markup."""
    return text.replace("[", "\\[")


def _hint(error: ClientError) -> str:
    if isinstance(error, UnreachableError):
        return "Is the service running there? Set --url (MEMSAVER_URL) or --uds."
    if exit_code_for(error) is ExitCode.UNAUTHORIZED:
        return "Set --api-key or MEMSAVER_API_KEY."
    return ""
