"""The commands of ``memsaver``."""

from __future__ import annotations

from typing import Annotated

import typer

from memsaver_server.cli import demo, doctor, fleet, live, memory, serve, store

_EPILOG = (
    "Exit codes: 0 success; 1 the operation failed; 2 invalid argument or request (unknown tag); "
    "3 no answer from the service; 4 key missing or wrong; 5 a conflicting operation is in progress; "
    "6 too little device or host memory; 7 a deadline passed (drain, or a phase without progress); "
    "8 try again later (the service is busy, or memory is released); 130 Ctrl-C."
)

app = typer.Typer(
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"memsaver {version('memsaver')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Give a GPU back while the inference engine that fills it stays alive."""


operating = (memory.release, memory.resume, memory.commit, memory.abort, memory.status, memory.kv_cache)
for command in (serve.serve, *operating, live.watch, live.top, doctor.doctor):
    app.command()(command)
app.add_typer(fleet.fleet, name="fleet")
app.add_typer(store.store, name="store")
app.command(context_settings={"allow_extra_args": True})(demo.demo)
