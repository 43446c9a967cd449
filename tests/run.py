"""Runs tests in several processes at a time: ``python -m tests.run [FILE or FOLDER ...] [options of pytest]``.

Each process has some files of one folder: a process has one saver, and each folder its own settings of it. Those that
compute longest begin first, by what ``--record`` wrote to seconds.json. Processes are forks, and the programs that
tests start are, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from pathlib import Path
from typing import Any

from tests import forks
from tests.native import build
from tests.native.site import sitecustomize

ROOT = Path(__file__).parents[1]
#: Of CPU, by file; programs that tests started are included.
SECONDS = Path(__file__).with_name("seconds.json")
#: Those that need neither a GPU nor another environment.
FOLDERS = ("devices", "e2e", "fleet", "native", "recordings", "reliability", "service", "unit")
#: Files share a process up to this time; each process takes a second to start.
TOGETHER_S = 30.0
#: What a file counts that is not known.
UNKNOWN_S = 5.0
#: Tests wait about as much as they compute.
PROCESSES = 3 * len(os.sched_getaffinity(0))

#: A fork has some plugins loaded, which pytest would rewrite.
PYTEST = (
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning", "-m", "not gpu"),
)

NOTHING: dict[str, Any] = {"outcomes": {}, "seconds": {}, "forks_cpu_seconds": 0.0}

Files = list[str]
Seconds = Mapping[str, float]


def main() -> int:
    arguments = [each for each in sys.argv[1:] if each != "--record"]
    paths = [each for each in arguments if each.startswith("tests")] or [f"tests/{each}" for each in FOLDERS]
    options = [each for each in arguments if each not in paths]
    known: dict[str, float] = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    began = time.monotonic()
    results = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(PROCESSES) as pool:
        shared = shares(paths, known)
        running = [pool.submit(run, share, options, Path(folder, str(number))) for number, share in enumerate(shared)]
        for each in as_completed(running):
            output, result = each.result()
            results.append(result)
            print(output, flush=True)
    report(results, time.monotonic() - began)
    if "--record" in sys.argv:
        took = {name: round(each, 1) for result in results for name, each in result["seconds"].items()}
        SECONDS.write_text(json.dumps({**known, **took}, indent=2, sort_keys=True) + "\n")
    return max((result["code"] for result in results if result["code"] != 5), default=5)  # 5: none was selected


def shares(paths: Sequence[str], known: Seconds) -> list[Files]:
    """What each process runs, the longest first."""
    files = [str(file.relative_to(ROOT)) for path in paths for file in files_of(ROOT / path)]
    made: list[tuple[float, Files]] = []
    for _, folder in groupby(sorted(files), key=os.path.dirname):
        made.append((0.0, []))
        for file in folder:
            seconds = known.get(file, UNKNOWN_S)
            if made[-1][1] and made[-1][0] + seconds > TOGETHER_S:
                made.append((0.0, []))
            made[-1] = (made[-1][0] + seconds, [*made[-1][1], file])
    return [share for _, share in sorted(made, key=lambda each: -each[0])]


def files_of(path: Path) -> list[Path]:
    return sorted(path.glob("test_*.py")) if path.is_dir() else [path]


def run(files: Files, options: Sequence[str], results: Path) -> tuple[str, dict[str, Any]]:
    """Run pytest on files. Returns its output and what ``hooks`` wrote, with the exit code."""
    ran = forks.run(
        [*PYTEST, *options, *files],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            sitecustomize.VARIABLE: str(build.faulty_module()),
            "OMP_NUM_THREADS": "1",
            "MEMSAVER_DRIVER": "host",
            "TESTS_RESULTS": str(results),
            forks.VARIABLE: forks.address(None),
        },
    )
    written = json.loads(results.read_text()) if results.exists() else NOTHING
    return ran.stdout, {**written, "code": ran.returncode}


def report(results: Sequence[Mapping[str, Any]], seconds: float) -> None:
    """Print the CPU seconds of each folder's tests, set-up and teardown included, and how all ended."""
    folders: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for result in results:
        outcomes.update(result["outcomes"])
        for file, took in result["seconds"].items():
            folders[os.path.dirname(file)] += took
    for folder, took in sorted(folders.items()):
        print(f"{took:8.1f} s  {folder}")
    cpu = forks.cpu_seconds() + sum(result["forks_cpu_seconds"] for result in results)
    ended = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    print(f"{ended} in {seconds:.0f} s, {cpu:.0f} s of CPU")


if __name__ == "__main__":
    sys.exit(main())
