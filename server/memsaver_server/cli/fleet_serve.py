"""``memsaver fleet serve``: one address for all engines of a fleet."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memsaver_server.cli.connection import print_error
from memsaver_server.cli.options import ExitCode
from memsaver_server.cli.serve import END_S, Ended, end_on_signals, settings_of
from memsaver_server.log_output import LogStream, hold_standard_files
from memsaver_server.missing_package import missing_package
from memsaver_server.systemd import notify

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
    host: Annotated[
        str, typer.Option(help="Address to serve on; any other than loopback needs MEMSAVER_API_KEY.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve on; 0 chooses a free one.", min=0, max=65535)] = 30000,
    uds: Annotated[
        Path | None, typer.Option(help="Serve on this Unix socket (mode 0600) instead.", show_default=False)
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(help="Private key for HTTPS, if --ssl-certfile lacks it.", show_default=False)
    ] = None,
    ssl_certfile: Annotated[
        Path | None, typer.Option(help="Serve HTTPS with this certificate (PEM).", show_default=False)
    ] = None,
) -> None:
    """Serve all engines as one: release, resume, status and dashboard together, and requests for their models.

    A request for a model wakes an engine of it; engines that share its GPUs make room. MEMSAVER_* variables set the
    other settings. SIGTERM and SIGINT end it with exit code 0; the engines keep their state.
    """
    hold_standard_files()
    sys.stderr = stream = LogStream("stderr", 2)
    atexit.register(stream.settle, END_S)
    end_on_signals()
    try:
        settings = settings_of()
        from memsaver_server.attachment import serve_app
        from memsaver_server.fleet.turns.options import TurnOptions

        file = models or (Path(members) if os.path.isfile(members) else None)
        turns = TurnOptions.read(file) if file is not None else TurnOptions()
        app = partial(_app, members, record, settings, turns, engine_api_key)
        attachment = serve_app(app, settings, host, port, uds, ssl_keyfile=ssl_keyfile, ssl_certfile=ssl_certfile)
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        reason = missing_package(error, "server,fleet") if isinstance(error, ImportError) else str(error)
        print_error(f"cannot start: {reason}")
        raise typer.Exit(int(ExitCode.FAILED)) from error
    except Ended:
        raise typer.Exit from None
    try:
        notify("READY=1")
        # One line on stdout, from which a caller learns the address if the port is 0.
        typer.echo(f"serving the fleet of {members} on {attachment.url}")
        while True:
            signal.pause()
    except Ended:
        notify("STOPPING=1")
    finally:
        attachment.close()


def _app(members: str, record: Path | None, settings: Settings, turns: TurnOptions, engine_key: str | None) -> FastAPI:
    from memsaver_server.fleet.fleet import AsyncFleet
    from memsaver_server.fleet.record import FileRecord
    from memsaver_server.fleet.serve.app import create_fleet_app
    from memsaver_server.fleet.sources import membership_of

    own = settings.api_key.get_secret_value() if settings.api_key else None
    key = engine_key or own
    fleet = AsyncFleet(membership_of(members), record=FileRecord(record) if record else None, api_key=key)
    return create_fleet_app(fleet, settings, turns=turns, engine_key=key)
