"""The command line, ``memsaver``. Commands that need torch or FastAPI import them when they run."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``memsaver`` command."""
    try:
        from memsaver_server.cli.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("memsaver"):
            raise
        from memsaver_server.missing_package import missing_package

        sys.exit(f"memsaver: {missing_package(error, 'cli')}")
    app(prog_name="memsaver")


__all__ = ["main"]
