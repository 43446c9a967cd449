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
        sys.exit(f"memsaver: the command line needs the package {error.name!r}: pip install 'memsaver[cli]'")
    app(prog_name="memsaver")


__all__ = ["main"]
