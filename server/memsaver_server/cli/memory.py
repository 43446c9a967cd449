"""``memsaver release``, ``resume``, ``commit``, ``abort``, ``status`` and ``kv-cache``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer

from memsaver_server.cli import tables
from memsaver_server.cli.connection import connected, sizes_as_asked
from memsaver_server.cli.live import outcome_view, until_ended, until_prepared
from memsaver_server.cli.options import Connection, ExitCode, Json, Tags, grouped
from memsaver_server.cli.request_options import Release, ResizeKvCache, Resume, Selector
from memsaver_server.cli.units import parse_size
from memsaver_server.client import ClientError

if TYPE_CHECKING:
    from memsaver_core.contract.reports import AcceptedAnswer, PreparedAnswer
    from memsaver_core.contract.requests import OperationName
    from memsaver_server.client import Client, OperationAnswer


@grouped
def release(
    tags: Tags = None, *, connection: Connection, as_json: Json = False, asked: Release, engines: Selector
) -> None:
    """Release the device memory of TAGS (default: all) to the driver. Ctrl-C cancels before memory is released.

    At a coordinator, on the engines that --name, --model, --label, --host and --gpu select.
    """
    _operate("release", [tags], connection, as_json, asked.given() | _of(engines), asked.at_least_bytes)


@grouped
def resume(
    tags: Tags = None, *, connection: Connection, as_json: Json = False, asked: Resume, engines: Selector
) -> None:
    """Bring back the device memory of TAGS (default: all that are released), at the same addresses.

    Ctrl-C cancels before memory is mapped. At a coordinator, on the engines that are selected, as for a release.
    """
    _operate("resume", [tags], connection, as_json, asked.given() | _of(engines))


def _of(engines: Selector) -> dict[str, Any]:
    return {"selector": selector} if (selector := engines.given()) else {}


def _operate(
    name: OperationName,
    tags: Sequence[list[str] | None],
    connection: Connection,
    as_json: bool,
    given: dict[str, Any],
    size: str | None = None,
) -> None:
    """Carry out an operation; ``tags`` are its positional arguments (none for a resize), ``given`` its options."""
    ways = {"run_async": "--async", "dry_run": "--dry-run", "prepare": "--prepare"}
    if len(both := [option for name, option in ways.items() if name in given]) > 1:
        raise typer.BadParameter(f"{both[0]} and {both[1]} exclude each other; leave one out")
    in_background, planned, prepare = (given.pop(name, False) for name in ways)
    with connected(connection, as_json=as_json) as client, sizes_as_asked(size):
        if planned:
            plan = client.plan(name, *tags, **given)
            tables.show(plan, tables.plan_view, as_json=as_json)
            blocked = ExitCode.OUT_OF_MEMORY if plan.is_short else ExitCode.FAILED
            raise typer.Exit(blocked if plan.blockers else ExitCode.OK)
        if prepare:
            given |= {"prepare": True, "key": uuid4().hex}
        starts: dict[OperationName, Callable[..., AcceptedAnswer]] = {
            "release": client.start_release,
            "resume": client.start_resume,
            "resize": client.start_resize_kv_cache,
        }
        start = partial(starts[name], *tags, **given)
        if prepare:
            ask: Callable[..., PreparedAnswer] = client.release if name == "release" else client.resume
            prepared = until_prepared(client, partial(ask, *tags, **given), start)
            of = f"{prepared.operation_id} --key {given['key']}"
            hint = f"do it with: memsaver commit {of}\nundo it with: memsaver abort {of}"
            tables.show(prepared, partial(tables.said_view, hint=hint), as_json=as_json)
        elif in_background:
            accepted = start()
            hint = f"follow it with: memsaver watch {accepted.operation_id}"
            tables.show(accepted, partial(tables.said_view, hint=hint), as_json=as_json)
        else:
            _show_done(client, until_ended(client, start), as_json)


def _show_done(client: Client, answer: OperationAnswer, as_json: bool) -> None:
    """Print what an operation did; without --json also which content is lost."""
    tables.show(answer, tables.operation_view, as_json=as_json)
    if not as_json:
        with suppress(ClientError):  # the operation itself has succeeded
            tables.show(client.occupation(), lambda now: tables.lost_view(now.lost), as_json=False)


@grouped
def status(connection: Connection, as_json: Json = False) -> None:
    """Show what the engine holds: each tag's state and size, each device, the host backup.

    At a coordinator also each engine; exits with 3 if one does not answer.
    """
    with connected(connection, as_json=as_json) as client:
        occupation = client.occupation()
    tables.show(occupation, tables.status_view, as_json=as_json)
    if not tables.all_answer(occupation):
        raise typer.Exit(ExitCode.UNREACHABLE)


@grouped
def kv_cache(
    size: Annotated[
        str | None, typer.Argument(help="The new size: 20GiB, or 50% of the largest.", show_default=False)
    ] = None,
    *,
    connection: Connection,
    as_json: Json = False,
    asked: ResizeKvCache,
) -> None:
    """Show the engine's KV cache; with SIZE or --tokens, make it smaller or larger while the engine serves.

    Ctrl-C cancels before memory is moved.
    """
    if given := asked.given() | _size(size):
        _operate("resize", [], connection, as_json, given)
        return
    with connected(connection, as_json=as_json) as client:
        tables.show(client.kv_cache(), tables.kv_cache_view, as_json=as_json)


def _size(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    try:
        return {"fraction": float(text[:-1]) / 100} if text.endswith("%") else {"bytes": parse_size(text)}
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 20GiB or 50%") from None


OperationId = Annotated[str, typer.Argument(help="The id that --prepare printed.")]
Key = Annotated[str | None, typer.Option("--key", help="The key that --prepare printed with the id.", metavar="KEY")]


@grouped
def commit(operation_id: OperationId, key: Key = None, *, connection: Connection, as_json: Json = False) -> None:
    """Commit a prepared operation."""
    with connected(connection, as_json=as_json) as client:
        _show_done(client, client.commit(operation_id, key=key), as_json)


@grouped
def abort(
    operation_id: OperationId,
    key: Key = None,
    force: Annotated[bool, typer.Option("--force", help="Abort even without the key of its owner.")] = False,
    *,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Undo what was prepared, or cancel an operation that does not move memory yet."""
    with connected(connection, as_json=as_json) as client:
        undone = client.abort(operation_id, key=key, force=force)
        tables.show(undone, partial(outcome_view, wanted="cancelled"), as_json=as_json)
