"""``memsaver store``: weights that a shared store keeps for engines that start later."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from memsaver_server.cli.connection import print_error
from memsaver_server.cli.options import ExitCode, Json, size_of
from memsaver_server.cli.tables import make_console, plain
from memsaver_server.cli.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memsaver_core.manifests import Kept, SharedStore

store = typer.Typer(help="Keep weights in a shared store, for engines that start later.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(envvar="MEMSAVER_SHARED_BACKUPS", help="The store, as MEMSAVER_SHARED_BACKUPS names it.")
]
Which = Annotated[
    str, typer.Argument(help="The model, its last part, or the beginning of an id in the list.", metavar="MODEL")
]


@store.command()
def keep(
    name: Name,
    limit: Annotated[str, typer.Option(help="How much to keep: the weights that were used last.", metavar="SIZE")],
    store_limit: Annotated[
        str | None,
        typer.Option(
            envvar="MEMSAVER_HOST_BACKUP_LIMIT",
            help="Limit of the whole store, if this is its first process [80% of the available memory].",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Keep the weights that engines gave to a store when they are gone, until SIGTERM or SIGINT.

    Each process that keeps the same store holds all of it: one may end, and another one has it.
    """
    from memsaver_core.manifests import keeper_command

    command = keeper_command(name, size_of(limit) or 0, size_of(store_limit) or 0)
    os.execv(command[0], command)


@store.command("list")
def list_weights(name: Name, as_json: Json = False) -> None:
    """List the weights that a store has, those used last first, and which processes hold them."""
    with _opened(name) as (joined, kept):
        status = joined.status()
    weights = [each.description() for each in kept]
    if as_json:
        about = {key: status[key] for key in ("name", "used_bytes", "total_bytes", "limit_bytes")}
        typer.echo(json.dumps(about | {"weights": weights}, indent=2))
        return
    table = Table("id", "weights", "size", "given", "last used", "held by", box=box.SIMPLE, pad_edge=False)
    table.columns[1].overflow = "fold"  # a name that is cut cannot be copied
    for each in weights:
        words = [each["model"], each["dtype"], each["quantization"], f"rank {each['rank']} of {each['ranks']}"]
        words += ["pinned"] * each["pinned"] + ["incomplete"] * (not each["complete"])
        holders = [f"{'keeper' if one['keeper'] else 'process'} {one['process']}" for one in each["held_by"]]
        ages = (f"{format_seconds(each[age])} ago" for age in ("age_s", "unused_s"))
        table.add_row(
            each["id"][:12],
            plain(", ".join(filter(None, words))),
            format_bytes(each["bytes"]),
            *ages,
            ", ".join(holders),
        )
    make_console().print(table)


@store.command()
def drop(name: Name, which: Which) -> None:
    """Hide these weights from engines that start later, and free their memory once no engine uses them."""
    _mark(name, which, "dropped")


@store.command()
def pin(
    name: Name,
    which: Which,
    off: Annotated[bool, typer.Option("--off", help="Undo it: keep them like all others.")] = False,
) -> None:
    """Keep these weights before all others, however long nobody uses them."""
    _mark(name, which, "unmarked" if off else "pinned")


def _mark(name: str, which: str, mark: str) -> None:
    with _opened(name) as (joined, kept):
        about = [each.description() for each in kept]
        model = {each["id"]: each["model"] for each in about if each["model"] == which}
        model = model or {each["id"]: each["model"] for each in about if which and Path(each["model"]).name == which}
        meant = model or {each["id"]: each["id"] for each in about if which and each["id"].startswith(which)}
        if len(could := dict.fromkeys(meant.values())) > 1:
            print_error(f"{which!r} could be {', '.join(could)}", "Write more of the one that you mean.")
            raise typer.Exit(ExitCode.INVALID)
        marked = [each for each in meant if joined.mark_text(each, mark)]
    if not marked:
        print_error(f"the store {name!r} has no weights {which!r}", f"See: memsaver store list {name}")
        raise typer.Exit(ExitCode.INVALID)
    typer.echo(f"{mark}: {', '.join(each[:12] for each in marked)}")


@contextmanager
def _opened(name: str) -> Iterator[tuple[SharedStore, list[Kept]]]:
    """Yield a store and the weights in it; end the command if no process has it."""
    from memsaver_core.contract.errors import ConfigurationError
    from memsaver_core.manifests import SharedStore, kept_in

    try:
        joined = SharedStore(name)
        yield joined, kept_in(joined)
    except ConfigurationError as error:
        print_error(str(error), "Start an engine with MEMSAVER_SHARED_BACKUPS, or memsaver store keep.")
        raise typer.Exit(ExitCode.UNREACHABLE) from None
