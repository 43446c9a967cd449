"""The options of commands that connect to a service, and how errors end a command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from memsaver_server.cli.exit_codes import ExitCode, exit_code_for
from memsaver_server.cli.tables import make_console
from memsaver_server.cli.units import parse_size
from memsaver_server.client import DEFAULT_URL, AnswerError, Client, ClientError, UnreachableError

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
URL_DEFAULT = DEFAULT_URL


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
