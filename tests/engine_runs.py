"""What ran where: the outcome of each test with a real engine or on a GPU, by engine, version, torch, device and date.

A run with ``TESTS_RUNS=FOLDER`` adds its outcomes there, one file for each device and set of versions; a test that runs
again replaces its line. ``python -m tests.engine_runs`` writes the table of benchmarks/README.md from all of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks/README.md"
RESULTS = ROOT / "benchmarks/results"
MARKS = "<!-- what runs where -->\n", "<!-- end of what runs where -->\n"
#: The distribution of the engine whose tests are in files whose paths have this in them.
ENGINES = {"vllm": "vllm", "sglang": "sglang", "tokenspeed": "tokenspeed", "fleet_on_ray": "ray"}
#: Tests without such an engine are those of memsaver itself.
OWN = "memsaver"
SHOWN = {"passed": "runs", "failed": "fails"}


def record(outcomes: Mapping[str, str]) -> None:
    """Add the outcomes of tests, by their ids, to the folder that ``TESTS_RUNS`` names."""
    ran = {test: outcome for test, outcome in outcomes.items() if outcome in SHOWN}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    for engine in sorted({engine_of(test) for test in ran}):
        about = {"engine": engine, "version": _version(engine), "torch": torch.__version__.split("+")[0]}
        about["device"] = f"{torch.cuda.device_count()} x {device}" if torch.cuda.device_count() > 1 else device
        name = re.sub(r"[^a-z0-9.]+", "-", "-".join(("tests", *about.values())).lower())
        file = Path(os.environ["TESTS_RUNS"], f"{name}.json")
        before = json.loads(file.read_text())["tests"] if file.exists() else {}
        now = {test: outcome for test, outcome in ran.items() if engine_of(test) == engine}
        date = datetime.now(timezone.utc).date().isoformat()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            json.dumps({**about, "date": date, "tests": {**before, **now}}, indent=1, sort_keys=True) + "\n"
        )


def engine_of(test: str) -> str:
    return next((engine for part, engine in ENGINES.items() if part in test.partition("::")[0]), OWN)


def _version(engine: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(engine)
    return ""


def page() -> str:
    """Return benchmarks/README.md with the table of all runs that are kept."""
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    runs = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*/tests-*.json"))]
    return before + MARKS[0] + "".join(f"{line}\n" for line in _table(runs)) + MARKS[1] + after


def _table(runs: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table for each engine: its tests by row, what ran them by column, in each the date of the last run."""
    latest: dict[str, dict[str, dict[str, str]]] = {}
    for run in sorted(runs, key=lambda run: str(run["date"])):
        column = f"{run['version']}, torch {run['torch']}, {run['device']}"
        for test, outcome in run["tests"].items():
            shown = f"{SHOWN[outcome]}, {run['date']}"
            latest.setdefault(run["engine"], {}).setdefault(_words(test), {})[column] = shown
    for engine, rows in sorted(latest.items()):
        columns = sorted({column for row in rows.values() for column in row})
        yield from ("", f"### {engine}", "", f"| what | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|")
        for words, row in rows.items():
            yield f"| {words} | {' | '.join(row.get(column, '') for column in columns)} |"
    yield ""


def _words(test: str) -> str:
    """Return the name of a test as words; of its file only if that names no engine."""
    path, _, name = test.partition("::")
    file = "" if engine_of(test) != OWN else f"{Path(path).stem.removeprefix('test_').removesuffix('_gpu')}: "
    name, _, case = name.removeprefix("test_").partition("[")
    return (file + name).replace("_", " ") + (f" ({case.removesuffix(']')})" if case else "")


if __name__ == "__main__":
    PAGE.write_text(page())
