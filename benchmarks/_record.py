"""How every benchmark says how its result came about, and writes it."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / date.today().isoformat()


def new_parser(description: str | None, out: Path = RESULTS) -> argparse.ArgumentParser:
    """Return a parser with the option ``--out``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out, help=f"folder for the results ({out})")
    return parser


def new_result(script: str) -> dict[str, Any]:
    """Return what every result begins with: the date, and the command line that anybody can repeat.

    The command line is that of this process, without the place where the results went.
    """
    kept: list[str] = []
    arguments = iter(sys.argv[1:])
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif not argument.startswith("--out="):
            kept.append(argument)
    command = shlex.join(["python", f"benchmarks/{script}", *kept])
    return {"date": date.today().isoformat(), "command": command}


def failed(error: Exception) -> dict[str, str]:
    """Return, for a cell of a table, what a part says that could not be measured."""
    return {"failed": str(error)[-300:].replace("\n", " ").replace("|", "/")}


def write(name: str, result: dict[str, Any], to_markdown: Callable[[dict[str, Any]], str] | None, out: Path) -> str:
    """Write ``name``.json, and ``name``.md if there is a ``to_markdown``, into the folder ``out``; return the page."""
    out.mkdir(parents=True, exist_ok=True)
    new = out / f".{name}.json"
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(out / f"{name}.json")  # another benchmark may read it at any moment
    page = to_markdown(result) if to_markdown is not None else ""
    if page:
        (out / f"{name}.md").write_text(page)
    return page
