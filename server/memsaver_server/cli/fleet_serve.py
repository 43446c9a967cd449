"""``memsaver fleet serve``: one address for all engines of a fleet."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memsaver_server.cli.serving import (
    Certificate,
    Host,
    Port,
    PrivateKey,
    UnixSocket,
    settings_of,
    starting,
    until_ended,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

    from memsaver_server.fleet.turns.options import TurnOptions
    from memsaver_server.settings import Settings


def serve(
    members: Annotated[
        str,
        typer.Option(
            "--members",
            help="Where the engines are listed: a YAML file, dns:NAME:PORT, srv:NAME or ray.",
            metavar="SOURCE",
        ),
    ],
    models: Annotated[
        Path | None,
        typer.Option(
            help="YAML file whose 'models' say how they take turns [the file of --members].", show_default=False
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="File that keeps what is wanted, so that the next coordinator carries on.", show_default=False
        ),
    ] = None,
    engine_api_key: Annotated[
        str | None,
        typer.Option(
            envvar="MEMSAVER_ENGINE_API_KEY",
            help="Key of engines that have none of their own in the list [MEMSAVER_API_KEY].",
            metavar="KEY",
            show_envvar=True,
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 30000,
    uds: UnixSocket = None,
    ssl_keyfile: PrivateKey = None,
    ssl_certfile: Certificate = None,
) -> None:
    """Serve all engines as one: release, resume, status and dashboard together, and requests for their models.

    A request for a model wakes an engine of it; engines that share its GPUs make room. MEMSAVER_* variables set the
    other settings. SIGTERM and SIGINT end it with exit code 0; the engines keep their state.
    """
    with starting("server,fleet"):
        settings = settings_of()
        from memsaver_server.attachment import serve_app
        from memsaver_server.fleet.turns.options import TurnOptions

        file = models or (Path(members) if os.path.isfile(members) else None)
        turns = TurnOptions.read(file) if file is not None else TurnOptions()
        app = partial(_app, members, record, settings, turns, engine_api_key)
        attachment = serve_app(app, settings, host, port, uds, ssl_keyfile=ssl_keyfile, ssl_certfile=ssl_certfile)
    with attachment, until_ended():
        # One line on stdout, from which a caller learns the address if the port is 0.
        typer.echo(f"serving the fleet of {members} on {attachment.url}")


def _app(members: str, record: Path | None, settings: Settings, turns: TurnOptions, engine_key: str | None) -> FastAPI:
    from memsaver_server.fleet.fleet import AsyncFleet
    from memsaver_server.fleet.record import FileRecord
    from memsaver_server.fleet.serve.app import create_fleet_app
    from memsaver_server.fleet.sources import membership_of

    own = settings.api_key.get_secret_value() if settings.api_key else None
    key = engine_key or own
    fleet = AsyncFleet(membership_of(members), record=FileRecord(record) if record else None, api_key=key)
    return create_fleet_app(fleet, settings, turns=turns, engine_key=key)
