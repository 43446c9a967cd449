"""``memsaver fleet``: the engines of a fleet, together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import typer

from memsaver_server.cli.connection import print_error
from memsaver_server.cli.fleet_tables import fleet_result_view, fleet_status_view
from memsaver_server.cli.options import ApiKey, ExitCode, Json, Tags, WaitForMemory, finite
from memsaver_server.cli.tables import make_console, plain

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import RenderableType

    from memsaver_server.fleet import Fleet, FleetEvent, FleetResult, Mode, Selector

fleet = typer.Typer(help="Release and resume many engines together, or not at all.", no_args_is_help=True)

Members = Annotated[
    str,
    typer.Option(
        "--members",
        help="Where the engines are listed: a YAML file, dns:NAME:PORT or srv:NAME.",
        metavar="SOURCE",
    ),
]
Record = Annotated[
    str | None,
    typer.Option(
        "--record",
        help="File that keeps what is wanted, so that the next command can carry on.",
        metavar="FILE",
    ),
]
Names = Annotated[list[str] | None, typer.Option("--name", help="Only engines of this name. Repeatable.")]
Models = Annotated[list[str] | None, typer.Option("--model", help="Only engines of this model. Repeatable.")]
Labels = Annotated[
    list[str] | None, typer.Option("--label", help="Only engines with this label. Repeatable.", metavar="NAME=VALUE")
]
Hosts = Annotated[list[str] | None, typer.Option("--host", help="Only engines on this host. Repeatable.")]
Gpus = Annotated[
    list[str] | None, typer.Option("--gpu", help="Only engines that use this GPU. Repeatable.", metavar="UUID")
]
BestEffort = Annotated[
    bool, typer.Option("--best-effort", help="On each engine by itself; those that fail are listed.")
]


@fleet.command()
def status(
    members: Members,
    api_key: ApiKey = None,
    names: Names = None,
    models: Models = None,
    labels: Labels = None,
    hosts: Hosts = None,
    gpus: Gpus = None,
    record: Record = None,
    as_json: Json = False,
) -> None:
    """Show every engine: its state, memory and GPUs, and what is wanted of it."""
    with _coordinating(members, api_key, record) as coordinator:
        now = coordinator.status(_selector(names, models, labels, hosts, gpus))
    _show(now, fleet_status_view(now), as_json)
    if not all(engine.alive for engine in now.engines):
        raise typer.Exit(ExitCode.UNREACHABLE)


@fleet.command()
def release(
    members: Members,
    tags: Tags = None,
    api_key: ApiKey = None,
    names: Names = None,
    models: Models = None,
    labels: Labels = None,
    hosts: Hosts = None,
    gpus: Gpus = None,
    record: Record = None,
    best_effort: BestEffort = False,
    hibernate: Annotated[bool, typer.Option("--hibernate", help="Release the CUDA contexts last.")] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Deadline of the drain, in seconds.", metavar="SECONDS", callback=finite)
    ] = 60.0,
    mode: Annotated[
        str, typer.Option("--mode", help="Requests in flight: wait for them, abort them, or keep (freeze) them.")
    ] = "wait",
    as_json: Json = False,
) -> None:
    """Release TAGS (default: all) on every selected engine, or on none. Ctrl-C gives up before memory is moved."""
    selector = _selector(names, models, labels, hosts, gpus)
    arguments = {"tags": tags, "hibernate": hibernate, "drain": mode, "timeout_s": timeout}
    _operate("release", members, api_key, record, selector, best_effort, as_json, arguments)


@fleet.command()
def resume(
    members: Members,
    tags: Tags = None,
    api_key: ApiKey = None,
    names: Names = None,
    models: Models = None,
    labels: Labels = None,
    hosts: Hosts = None,
    gpus: Gpus = None,
    record: Record = None,
    best_effort: BestEffort = False,
    wait_for_memory: WaitForMemory = None,
    as_json: Json = False,
) -> None:
    """Bring TAGS (default: all) back on every selected engine, or on none. Ctrl-C gives up before memory is moved."""
    selector = _selector(names, models, labels, hosts, gpus)
    arguments = {"tags": tags, "wait_for_memory_s": wait_for_memory}
    _operate("resume", members, api_key, record, selector, best_effort, as_json, arguments)


@fleet.command()
def watch(
    members: Members,
    api_key: ApiKey = None,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, help="Seconds between updates.", metavar="SECONDS")
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Follow all engines until Ctrl-C: who joins, fails or changes its state, and the progress of operations."""
    console = make_console()
    with _coordinating(members, api_key, None) as coordinator:
        try:
            for event in coordinator.watch(interval):
                if as_json:
                    typer.echo(event.model_dump_json())
                else:
                    console.print(plain(_line(event)), soft_wrap=True)
        except KeyboardInterrupt:
            raise typer.Exit from None


@contextmanager
def _coordinating(members: str, api_key: str | None, record: str | None) -> Iterator[Fleet]:
    """Yield a coordinator. An error of the fleet inside ends the command with its message on stderr."""
    try:
        from memsaver_server.fleet import FileRecord, Fleet, FleetError, MembershipError, RecordError, membership_of

        membership = membership_of(members)
    except ModuleNotFoundError as error:
        from memsaver_server.missing_package import missing_package

        raise typer.BadParameter(missing_package(error, "fleet")) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with Fleet(membership, record=FileRecord(record) if record else None, api_key=api_key) as coordinator:
            yield coordinator
    except (FleetError, MembershipError, RecordError, ValueError) as error:
        print_error(str(error))
        raise typer.Exit(ExitCode.INVALID) from None


def _operate(
    verb: str,
    members: str,
    api_key: str | None,
    record: str | None,
    selector: Selector,
    best_effort: bool,
    as_json: bool,
    arguments: dict[str, Any],
) -> None:
    operation_id = uuid4().hex[:12]
    mode: Mode = "best_effort" if best_effort else "all"
    with _coordinating(members, api_key, record) as coordinator:
        run = coordinator.release if verb == "release" else coordinator.resume
        try:
            result = run(selector, mode=mode, operation_id=operation_id, **arguments)
        except KeyboardInterrupt:
            result = _given_up(coordinator, operation_id)
    _show(result, fleet_result_view(result), as_json)
    if not result.success:
        raise typer.Exit(_code(result))


def _show(answer: BaseModel, view: RenderableType, as_json: bool) -> None:
    if as_json:
        typer.echo(answer.model_dump_json(indent=2))
    else:
        make_console().print(view)


def _given_up(coordinator: Fleet, operation_id: str) -> FleetResult:
    """Return the result of an operation that Ctrl-C gives up, if it is not too late."""
    from memsaver_server.fleet import FleetError

    try:
        return coordinator.cancel(operation_id)
    except FleetError as error:
        typer.echo(f"memsaver: {error}", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _code(result: FleetResult) -> ExitCode:
    """Return the exit code of a failure: of the first engine's kind of error that has one."""
    codes = {
        "unreachable": ExitCode.UNREACHABLE,
        "silent": ExitCode.UNREACHABLE,
        "unauthorized": ExitCode.UNAUTHORIZED,
        "forbidden": ExitCode.UNAUTHORIZED,
        "unknown_tag": ExitCode.INVALID,
        "conflict": ExitCode.CONFLICT,
        "out_of_device_memory": ExitCode.OUT_OF_MEMORY,
        "out_of_host_memory": ExitCode.OUT_OF_MEMORY,
        "drain_timeout": ExitCode.DEADLINE,
        "hung": ExitCode.DEADLINE,
    }
    return next((codes[engine.kind] for engine in result.failed if engine.kind in codes), ExitCode.FAILED)


def _selector(
    names: list[str] | None,
    models: list[str] | None,
    labels: list[str] | None,
    hosts: list[str] | None,
    gpus: list[str] | None,
) -> Selector:
    from memsaver_server.fleet import Selector

    pairs = {}
    for label in labels or ():
        name, separator, value = label.partition("=")
        if not (name and separator):
            raise typer.BadParameter(f"{label!r} is not NAME=VALUE; write for example role=rollout")
        pairs[name] = value
    return Selector(
        names=tuple(names or ()),
        models=tuple(models or ()),
        labels=pairs,
        hosts=tuple(hosts or ()),
        gpus=tuple(gpus or ()),
    )


def _line(event: FleetEvent) -> str:
    """Return an event as one line."""
    about = {key: value for key, value in event.data.items() if value not in (None, "", [], {})}
    if event.event in ("operation", "result"):
        about = {key: about.get(key) for key in ("operation", "operation_id", "stage", "message") if key in about}
    said = " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in about.items())
    return f"{datetime.fromtimestamp(event.at):%H:%M:%S}  {event.event:<10} {event.engine:<24} {said}".rstrip()
