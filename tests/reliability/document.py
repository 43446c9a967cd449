"""Writes docs/reliability.md from page.md, the recorded figures, and the tests that name known failures.

python -m tests.reliability.document            # with the figures recorded last
python -m tests.reliability.document --record   # first records what was measured last by the tests (with every case),
                                                # by `make soak`, and by tests.reliability.compute_sanitizer on a GPU
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.reliability.figures import kept
from tests.reliability.known_failures import HAPPENED, KNOWN_FAILURES

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "reliability.md"
RECORD = ROOT / "benchmarks" / "results" / "reliability.json"
MEASURED = (
    *("every_call", "state_machine", "deaths", "kills", "described_requests", "bad_requests", "fuzz", "soak"),
    "compute_sanitizer",
)

#: The functions of csrc/driver/driver.hpp and of the operating system that are made to fail.
CALLS = {
    "allow_access": "make mapped memory readable and writable",
    "copy_to_device": "copy from host to device",
    "copy_to_host": "copy from device to host",
    "create": "allocate physical device memory",
    "create_exportable": "allocate device memory that processes share",
    "create_stream": "create a stream",
    "destroy_stream": "destroy a stream",
    "device_info": "ask for a device's properties",
    "digest": "compute digests on the device",
    "done": "ask whether an event has completed",
    "export_handle": "make a descriptor of device memory",
    "fallocate": "free part of the backup file",
    "fill_zero": "write zeros on the device",
    "fopen": "open a file that reports memory limits",
    "fstatvfs": "ask for the free space of a file system",
    "graph_memory": "ask for the bytes held for CUDA graphs",
    "import_handle": "take over another process's device memory",
    "madvise": "make pages of the shared store",
    "map": "map physical memory at an address",
    "memory_info": "ask for a device's free memory",
    "mkostemp": "create a temporary file that has a name",
    "mmap": "reserve host memory",
    "open": "create the backup file",
    "pack": "pack content on the device",
    "pread": "read from the backup file",
    "pwrite": "write to the backup file",
    "record": "record an event in a stream",
    "register_host": "pin host memory",
    "release": "free physical device memory",
    "reserve": "reserve addresses",
    "sample": "sample content on the device",
    "set_stack_limit": "change the size of a thread's stack",
    "stack_limit": "ask for the size of a thread's stack",
    "stream_wait": "make a stream wait for an event",
    "synchronize": "wait for all work on a device",
    "thread": "start a thread",
    "trim_graph_memory": "free memory cached for CUDA graphs",
    "unmap": "unmap device memory",
    "unpack": "unpack content on the device",
    "unregister_host": "unpin host memory",
    "unreserve": "give addresses back",
    "wait": "wait for an event",
}
ERRORS = {
    "context lost": "context lost (driver)",
    "invalid value": "invalid value (driver)",
    "out of memory": "out of memory (driver)",
    "short": "fewer bytes read or written than asked for",
}
QUANTITIES = {
    "release_s": "time of a release (s)",
    "resume_s": "time of a resume (s)",
    "resident_mib": "resident host memory (MiB)",
    "files": "open files",
    "threads": "threads",
    "pinned_mib": "pinned memory (MiB)",
}


def guarded_by(decorator: ast.expr) -> list[str]:
    """The failures that a decorator names, if it is ``@pytest.mark.guards(...)``."""
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.guards":
        return [ast.literal_eval(argument) for argument in decorator.args]
    return []


def guards() -> Iterator[tuple[Path, str, str]]:
    """Each test's file, its name, and a failure that it guards against."""
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for failure in (name for decorator in node.decorator_list for name in guarded_by(decorator)):
                    yield path.relative_to(TESTS), node.name, failure


def tests_by_failure() -> dict[str, dict[str, list[str]]]:
    """For each known failure the files with tests for it, and the tests' names."""
    found: dict[str, dict[str, list[str]]] = {happened: {} for happened in HAPPENED}
    for path, test, failure in guards():
        found[failure].setdefault(str(path), []).append(test)
    return found


def known_failures() -> str:
    """The last section: under each area its failures, under each failure its tests by file."""
    tests = tests_by_failure()
    lines = []
    for area, failures in KNOWN_FAILURES.items():
        lines += [f"### {area}", ""]
        for happened, holds in failures:
            lines += [f"**{happened[0].upper()}{happened[1:]}.** {holds}", ""]
            for path, names in tests[happened].items():
                lines.append(f"- `{path}`: " + ", ".join(f"`{name}`" for name in names))
            lines.append("")
    return "\n".join(lines).rstrip()


def table(*rows: tuple[object, ...]) -> str:
    return "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows)


def deaths(places: list[str]) -> str:
    """Places are "operation, call"."""
    calls: dict[str, list[str]] = {}
    for place in sorted(places):
        operation, call = place.split(", ")
        calls.setdefault(operation, []).append(f"`{call}`")
    return table(*((operation, ", ".join(names)) for operation, names in calls.items()))


def soaked(fits: dict[str, Any]) -> str:
    return table(
        *(
            (
                QUANTITIES[name],
                *(f"{value:g}" for value in fit["by_tenth"]),
                f"{fit['level']:.3f}",
                f"{fit['growth']:+.3f}",
            )
            for name, fit in fits.items()
        )
    )


def page() -> str:
    """The whole page, from the recorded figures."""
    figures = json.loads(RECORD.read_text())
    every_call = figures["every_call"]
    return (
        (TESTS / "reliability" / "page.md")
        .read_text()
        .format(
            **figures | {"deaths": deaths(figures["deaths"])},
            calls=table(*((f"`{call}`", CALLS.get(call, ""), f"{n:,}") for call, n in every_call["by_call"].items())),
            errors=table(
                *((ERRORS.get(error, error), f"{cases:,}") for error, cases in every_call["by_error"].items())
            ),
            places=len(figures["deaths"]),
            fits=soaked(figures["soak"]["fits"]),
            h200=json.loads((ROOT / "benchmarks" / "results" / "soak-h200.json").read_text()),
            on_the_gpu=table(
                *(
                    (*name.split(", "), run["tests"], run["findings"])
                    for name, run in figures["compute_sanitizer"]["runs"].items()
                )
            ),
            known=known_failures(),
        )
    )


def record() -> None:
    """Keep what was measured last for the page."""
    figures = {name: kept(name) for name in MEASURED}
    missing = [name for name in MEASURED if not figures[name]]
    if missing:
        raise SystemExit(f"no figures of {', '.join(missing)}: run what measures them first")
    if figures["every_call"]["stride"] != 1:
        raise SystemExit("only part of the cases was run: run `make test-long`")
    RECORD.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="record what was measured last")
    if parser.parse_args().record:
        record()
    PAGE.write_text(page())
