"""Records, and compares with what was recorded; see the package."""

from __future__ import annotations

import argparse
import atexit
import difflib
import gc
import logging
import os
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic.warnings import UnsupportedFieldAttributeWarning

from .layout import WIDTH, text_of

FILES = Path(__file__).with_name("files")
#: Lines of differences that are printed for each file.
SHOWN = 120
#: Instead of what depends on the machine, the user or continuous integration.
ENVIRONMENT = {
    "MEMSAVER_DRIVER": "host",
    "MEMSAVER_HOST_CAPACITY": "64MiB",
    "MEMSAVER_HOST_BACKUP_LIMIT": "1GiB",
    "MEMSAVER_PREPARE_BACKUP": "0",  # it pins memory in the background
    "TERMINAL_WIDTH": "160",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "TZ": "UTC",
    "OMP_NUM_THREADS": "1",
}
_LEFT_OUT = ("MEMSAVER_", "GITHUB_ACTIONS", "FORCE_COLOR", "PY_COLORS", "COLUMNS", "LINES", "OTEL_", "SSL_CERT_")

Group = Callable[[Path], Iterator[tuple[str, Any]]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.recordings", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write the files")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="write them there, and compare nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        recorded = arguments.to or Path(scratch) / "recorded"
        recorded.mkdir(exist_ok=True)
        _record(recorded, Path(scratch))
        if arguments.record:
            shutil.rmtree(FILES, ignore_errors=True)
            shutil.copytree(recorded, FILES)
        elif not arguments.to:
            found = [line for name in names(FILES) | names(recorded) for line in difference(name, recorded)]
            print("\n".join(found) or "everything is as recorded")
            sys.exit(1 if found else 0)


def names(folder: Path) -> set[str]:
    """The recordings in ``folder``."""
    return {path.stem for path in folder.glob("*.json")}


def difference(name: str, recorded: Path) -> list[str]:
    """Return how a recording in the folder ``recorded`` differs from the file, as lines; none if it does not."""
    before, now = (path / f"{name}.json" for path in (FILES, recorded))
    lines = [path.read_text().splitlines() if path.exists() else [] for path in (before, now)]
    found = list(difflib.unified_diff(*lines, f"recorded/{name}.json", f"now/{name}.json", lineterm="", n=8))
    found = [line if len(line) <= WIDTH + 60 else f"{line[: WIDTH + 60]} ..." for line in found]
    more = [f"... and {len(found) - SHOWN} more lines"] if len(found) > SHOWN else []
    return found[:SHOWN] + more


def _groups() -> dict[str, tuple[Group, dict[str, str]]]:
    """What is recorded in each process, and changes of its environment. What takes longest is first."""
    from . import clients, command_line, engine, fleet, operations, others, ranks, refusals, together

    return {
        "fleet": (fleet.doors, {}),
        "engine": (engine.doors, {}),
        "together": (together.together, {}),
        "command_line": (command_line.command_line, {}),
        "operations": (operations.operations, {}),
        "clients": (clients.clients, {}),
        "refusals": (refusals.refusals, {}),
        "others": (others.others, {}),
        "ranks": (ranks.ranks, {}),
        "disabled": (refusals.disabled, {"MEMSAVER_ENABLED": "0"}),
        "without_room": (refusals.without_room, {"MEMSAVER_HOST_BACKUP_LIMIT": "64KiB"}),
        "lost": (refusals.lost, {}),
    }


def _record(recorded: Path, scratch: Path) -> None:
    """Write all recordings into the folder ``recorded``; each group runs in a fork of this process."""
    for name in [name for name in os.environ if name.startswith(_LEFT_OUT)]:
        del os.environ[name]
    os.environ.update(ENVIRONMENT)
    from tests.native import injection
    from tests.native.site import sitecustomize

    if sitecustomize.VARIABLE not in os.environ:  # else the interpreter has it from its start
        injection.install()
    import torch._dynamo  # noqa: F401  # which torch imports at the first use of a region

    waiting, running, failed = _groups(), {}, []
    gc.freeze()  # else each process looks through all that torch has loaded, again and again
    while waiting or running:
        while waiting and len(running) < max(2, os.cpu_count() or 1):
            name = next(iter(waiting))
            running[_fork(name, *waiting.pop(name), recorded, scratch)] = name
        pid, status = os.wait()
        if status:
            failed.append(running[pid])
        del running[pid]
    if failed:
        sys.exit(f"cannot record {', '.join(failed)}: see above")


def _fork(name: str, group: Group, environment: dict[str, str], recorded: Path, scratch: Path) -> int:
    """Record one group in a new process; return its id."""
    if child := os.fork():
        return child
    code = 1
    atexit._clear()  # what the parent does at its end
    try:
        os.environ.update(environment)
        torch.set_num_threads(1)  # two threads that are the first to do it in a fork may find no pool of threads
        logging.getLogger().addHandler(logging.NullHandler())  # warnings of what is provoked here
        folder = scratch / name
        folder.mkdir()
        os.environ["MEMSAVER_FILE_DIR"] = str(folder)
        for file, content in group(folder):
            (recorded / f"{file}.json").write_text(text_of(content))
        atexit._run_exitfuncs()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    # FastAPI suppresses it, but not while two threads make applications; it would be in what a command prints.
    warnings.filterwarnings("ignore", category=UnsupportedFieldAttributeWarning)
    main()
