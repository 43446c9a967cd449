"""The command line, ``memsaver``. Commands import what they need when they run, so that ``status`` starts no torch."""

from __future__ import annotations


def main() -> None:
    """Entry point of the ``memsaver`` command."""
    from memsaver_server.cli.commands import app

    app(prog_name="memsaver")


__all__ = ["main"]
