"""Writes docs/reliability.md from page.md and the recorded figures.

python -m tests.reliability.document            # with the figures recorded last
python -m tests.reliability.document --record   # first records what was measured last by the tests (with every case),
                                                # by `make soak`, and by tests.reliability.compute_sanitizer on a GPU
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tests.reliability.figures import kept
from tests.reliability.runs import runs, tests_run

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "reliability.md"
RECORD = ROOT / "benchmarks" / "results" / "reliability.json"
MEASURED = (
    *("every_call", "state_machine", "deaths", "kills", "kills_in_a_store", "keeper_kills", "keeper_cycles"),
    *("described_requests", "bad_requests", "fuzz", "soak", "compute_sanitizer"),
)

QUANTITIES = {
    "release_s": "time of a release (s)",
    "resume_s": "time of a resume (s)",
    "resident_mib": "resident host memory (MiB)",
    "files": "open files",
    "threads": "threads",
    "pinned_mib": "pinned memory (MiB)",
}


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
    return (
        (TESTS / "reliability" / "page.md")
        .read_text()
        .format(
            **figures | {"deaths": deaths(figures["deaths"])},
            functions=len(figures["every_call"]["by_call"]),
            errors=len(figures["every_call"]["by_error"]),
            places=len(figures["deaths"]),
            fits=soaked(figures["soak"]["fits"]),
            runs=table(*runs(), *tests_run()),
            h200=json.loads((ROOT / "benchmarks" / "results" / "soak-h200.json").read_text()),
            on_the_gpu=table(
                *(
                    (*name.split(", "), run["tests"], run["findings"])
                    for name, run in figures["compute_sanitizer"]["runs"].items()
                )
            ),
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
