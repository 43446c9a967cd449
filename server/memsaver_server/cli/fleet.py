"""``memsaver fleet``: the engines of a fleet, together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import typer

from memsaver_server.cli import serving
from memsaver_server.cli.connection import exit_code, print_error
from memsaver_server.cli.options import ExitCode, Interval, Json, Options, Tags, grouped
from memsaver_server.cli.request_options import FleetRelease, FleetResume, Selector
from memsaver_server.cli.tables import all_answer, fleet_result_view, fleet_status_view, make_console, plain, show
from memsaver_server.missing_package import missing_package

if TYPE_CHECKING:
    from fastapi import FastAPI

    from memsaver_core.contract import requests
    from memsaver_server.fleet import Fleet, FleetEvent
    from memsaver_server.fleet.turns.options import TurnOptions
    from memsaver_server.settings import Settings

fleet = typer.Typer(help="Release and resume many engines together, or not at all.", no_args_is_help=True)


class Members(Options):
    """The engines of a fleet, and their key."""

    members: str = typer.Option(
        ..., help="Where the engines are listed: a YAML file, dns:NAME:PORT, srv:NAME or ray.", metavar="SOURCE"
    )
    api_key: str | None = typer.Option(
        None, envvar="MEMSAVER_API_KEY", help="Key of the engines.", metavar="KEY", show_envvar=True
    )
    silence: float | None = typer.Option(
        None,
        envvar="MEMSAVER_SILENCE_S",
        help="How long to wait for an engine that does not answer [10].",
        metavar="SECONDS",
        min=0.1,
        show_envvar=True,
    )


class Engines(Selector, Members):
    """The engines that a command selects, and the record of what is wanted of them."""

    record: str | None = typer.Option(
        None, help="File that keeps what is wanted, so that the next command can carry on.", metavar="FILE"
    )

    def selector(self) -> requests.Selector:
        from memsaver_core.contract import requests

        given = self.given()
        return requests.Selector(**{name: given[name] for name in Selector.types() if name in given})


@fleet.command()
@grouped
def status(engines: Engines, as_json: Json = False) -> None:
    """Show every engine: its state, memory and GPUs, and what is wanted of it."""
    with _coordinating(engines, engines.record) as coordinator:
        now = coordinator.status(engines.selector())
    show(now, fleet_status_view, as_json=as_json)
    if not all_answer(now):
        raise typer.Exit(ExitCode.UNREACHABLE)


@fleet.command()
@grouped
def release(tags: Tags = None, *, engines: Engines, asked: FleetRelease, as_json: Json = False) -> None:
    """Release TAGS (default: all) on every selected engine, or on none. Ctrl-C gives up before memory is moved."""
    _operate(tags, engines, asked, as_json)


@fleet.command()
@grouped
def resume(tags: Tags = None, *, engines: Engines, asked: FleetResume, as_json: Json = False) -> None:
    """Bring TAGS (default: all) back on every selected engine, or on none. Ctrl-C gives up before memory is moved."""
    _operate(tags, engines, asked, as_json)


@fleet.command()
@grouped
def watch(members: Members, interval: Interval = 1.0, as_json: Json = False) -> None:
    """Follow all engines until Ctrl-C: who joins, fails or changes its state, and the progress of operations."""
    console = make_console()
    with _coordinating(members) as coordinator:
        try:
            for event in coordinator.watch(interval):
                if as_json:
                    typer.echo(event.model_dump_json())
                else:
                    console.print(plain(_line(event)), soft_wrap=True)
        except KeyboardInterrupt:
            raise typer.Exit from None


@contextmanager
def _coordinating(at: Members, record: str | None = None) -> Iterator[Fleet]:
    """Yield a coordinator. An error of the fleet inside ends the command with its message on stderr."""
    try:
        from memsaver_core.contract.requests import DEFAULT_SILENCE_S
        from memsaver_server.fleet import FileRecord, Fleet, FleetError, MembershipError, RecordError, membership_of

        membership = membership_of(at.members)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(missing_package(error, "fleet")) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        kept = FileRecord(record) if record else None
        silence_s = at.silence or DEFAULT_SILENCE_S
        with Fleet(membership, record=kept, api_key=at.api_key, silence_s=silence_s) as coordinator:
            yield coordinator
    except (FleetError, MembershipError, RecordError, ValueError) as error:
        print_error(str(error))
        raise typer.Exit(ExitCode.INVALID) from None


def _operate(tags: list[str] | None, engines: Engines, asked: FleetRelease | FleetResume, as_json: bool) -> None:
    from memsaver_core.contract.errors import status_of

    operation_id, selector, options = uuid4().hex[:12], engines.selector(), asked.given()
    with _coordinating(engines, engines.record) as coordinator:
        run = coordinator.release if isinstance(asked, FleetRelease) else coordinator.resume
        try:
            result = run(selector, tags=tags, operation_id=operation_id, **options)
        except KeyboardInterrupt:
            from memsaver_server.fleet import FleetError

            try:
                result = coordinator.cancel(operation_id)
            except FleetError as error:  # it is too late
                typer.echo(f"memsaver: {error}", err=True)
                raise typer.Exit(ExitCode.INTERRUPTED) from None
    show(result, fleet_result_view, as_json=as_json)
    if not result.success:
        codes = (exit_code(engine.kind, status_of(engine.kind)) for engine in result.failed)
        raise typer.Exit(next((code for code in codes if code is not ExitCode.FAILED), ExitCode.FAILED))


def _line(event: FleetEvent) -> str:
    about = {key: value for key, value in event.data.items() if value not in (None, "", [], {})}
    if event.event in ("operation", "result"):
        about = {key: about.get(key) for key in ("operation", "operation_id", "stage", "message") if key in about}
    said = " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in about.items())
    return f"{datetime.fromtimestamp(event.at):%H:%M:%S}  {event.event:<10} {event.engine:<24} {said}".rstrip()


class Served(Options):
    """The fleet that a server stands for."""

    members: str = Members.members
    models: Path | None = typer.Option(
        None, help="YAML file whose 'models' say how they take turns; by default that of --members.", show_default=False
    )
    record: Path | None = typer.Option(
        None, help="File that keeps what is wanted, so that the next coordinator carries on.", show_default=False
    )
    engine_api_key: str | None = typer.Option(
        None,
        envvar="MEMSAVER_ENGINE_API_KEY",
        help="Key of engines that have none in the list; by default MEMSAVER_API_KEY.",
        metavar="KEY",
        show_envvar=True,
    )
    silence: float | None = Members.silence


@fleet.command()
@grouped
def serve(served: Served, at: serving.Listening) -> None:
    """Serve all engines as one: release, resume, status and dashboard together, and requests for their models.

    A request for a model wakes an engine of it; engines that share its GPUs make room. MEMSAVER_* variables set the
    other settings. SIGTERM and SIGINT end it with exit code 0; the engines keep their state.
    """
    with serving.starting("server,fleet"):
        settings = serving.settings_of(silence_s=served.silence)
        from memsaver_server.attachment import serve_app
        from memsaver_server.fleet.turns.options import TurnOptions

        file = served.models or (Path(served.members) if os.path.isfile(served.members) else None)
        turns = TurnOptions.read(file) if file is not None else TurnOptions()
        attachment = serve_app(partial(_app, served, settings, turns), settings, **vars(at))
    with attachment, serving.until_ended():
        # One line on stdout, from which a caller learns the address if the port is 0.
        typer.echo(f"serving the fleet of {served.members} on {attachment.url}")


def _app(served: Served, settings: Settings, turns: TurnOptions) -> FastAPI:
    from memsaver_server.app import create_fleet_app
    from memsaver_server.fleet.fleet import AsyncFleet
    from memsaver_server.fleet.record import FileRecord
    from memsaver_server.fleet.sources import membership_of

    key = served.engine_api_key or (settings.api_key.get_secret_value() if settings.api_key else None)
    record = FileRecord(served.record) if served.record else None
    fleet = AsyncFleet(membership_of(served.members), record=record, api_key=key, silence_s=settings.silence_s)
    return create_fleet_app(fleet, settings, turns=turns, engine_key=key)
