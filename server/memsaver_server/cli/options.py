"""The options of commands that connect to a service, and the exit codes. Takes no package but typer: help is quick."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Annotated

import typer

from memsaver_server.client.address import DEFAULT_URL as DEFAULT_URL

Url = Annotated[
    str,
    typer.Option(
        "--url", envvar="MEMSAVER_URL", help="Address of the service: host:port, a URL, or unix:///path.", metavar="URL"
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


def finite(seconds: float | None) -> float | None:
    """Return a number of seconds as it was given.

    Raises:
        BadParameter: it is infinite or no number.
    """
    if seconds is not None and not math.isfinite(seconds):
        raise typer.BadParameter(
            f"{seconds} is not a number of seconds; leave the option out, or write for example 3600"
        )
    return seconds


WaitForMemory = Annotated[
    float | None,
    typer.Option(
        "--wait-for-memory",
        help="Seconds to retry while other processes hold the device's memory.",
        metavar="SECONDS",
        callback=finite,
    ),
]
Verify = Annotated[
    bool,
    typer.Option(
        "--verify", help="The tokens of a fixed prompt must be the same before a release and after the resume."
    ),
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
