"""Writes docs/reliability.md: figures that the tests measured last, and which test stands for which known failure.

python -m tests.reliability.document            # all of it, after `make soak`, and the tests with every case
python -m tests.reliability.document --tests    # the table of known failures alone
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path
from typing import Any

from tests.reliability.figures import kept

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"

#: What users of systems that do this job have met, in short. Each is a test here.
KNOWN = {
    "R1": "success was answered before the memory was free",
    "R2": "memory was unmapped under running kernels",
    "R3": "out of memory on resume killed the process",
    "R4": "a second release or resume failed",
    "R5": "release of one tag, then of everything, failed",
    "R6": "an allocation under a released tag broke the resume",
    "R7": "freeing a released tensor released it twice",
    "R8": "resume of everything failed on what was never released",
    "R9": "of two callers at once, one was told failure",
    "R10": "the caller went away in the middle",
    "R11": "health probes told asleep and dead apart wrongly",
    "R12": "a request that came meanwhile hung or met released memory",
    "R13": "a prefix cache led to discarded pages",
    "R14": "undefined pages of the KV cache gave NaN",
    "R15": "tensors were under the wrong tag",
    "G1": "the graph's pool was discarded: misaligned address on replay",
    "G2": "pausing a graph freed nothing",
    "G3": "replay with NCCL hung after a remap",
    "B1": "content was wrong after a restore",
    "B2": "host memory stayed resident, or freeing it made resume slow",
    "B3": "pinned memory took twice its size",
    "B4": "dead blocks were backed up too",
    "B5": "a backup larger than host memory met the OOM killer",
    "B6": "backup files were left behind",
    "T1": "out of memory inside of the allocator killed the process",
    "T2": "the process aborted when it ended",
    "T3": "expandable segments freed nothing",
    "T4": "fork after initialization",
    "T5": "sharing tensors by CUDA IPC failed",
    "T6": "only the current device was synchronized",
    "T7": "a region inside of a region went to the wrong pool",
    "S1": "two engines on one GPU hung",
    "S2": "one rank failed and the others went on",
    "S3": "waits without end or diagnosis",
    "S4": "memory grew by the cycle",
    "S5": "a process was killed in the middle",
}


def keys_of(docstring: str) -> list[str]:
    """The keys that a test's docstring starts with: ``R1: ...``, or ``R1, R2: ...`` where it guards against several."""
    start = re.match(r"((?:[RGBTS]\d+, )*[RGBTS]\d+): ", docstring)
    return start.group(1).split(", ") if start else []


def tests_by_key() -> dict[str, list[str]]:
    """The tests whose docstrings start with the key."""
    found: dict[str, list[str]] = {key: [] for key in KNOWN}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for key in keys_of(ast.get_docstring(node) or ""):
                    if key in found:
                        found[key].append(f"`{path.relative_to(ROOT / 'tests')}` {node.name}")
    return found


def known_failures() -> str:
    """The rows of the table of known failures."""
    return "\n".join(
        f"| {key} | {KNOWN[key]} | {'<br>'.join(tests) or 'none yet'} |" for key, tests in tests_by_key().items()
    )


def tenths(fit: dict[str, Any]) -> str:
    return " ".join(f"{value:g}" for value in fit["by_tenth"])


def page() -> str:
    names = (
        *("every_call", "state_machine", "deaths", "kills", "described_requests", "bad_requests", "fuzz", "soak"),
        "compute_sanitizer",
    )
    figures = {name: kept(name) for name in names}
    missing = [name for name in names if not figures[name]]
    if missing:
        raise SystemExit(f"no figures of {', '.join(missing)}: run what measures them first")
    if figures["every_call"]["stride"] != 1:
        raise SystemExit("the figures are of a part of the cases: run the tests with MEMSAVER_EVERY_CALL_STRIDE=1")
    fits = figures["soak"]["fits"].items()
    on_h200 = json.loads((ROOT / "benchmarks" / "results" / "soak-h200.json").read_text())
    return (
        (ROOT / "tests" / "reliability" / "page.md")
        .read_text()
        .format(
            **figures | {"deaths": "; ".join(sorted(figures["deaths"]))},
            calls="\n".join(f"| {call} | {cases:,} |" for call, cases in figures["every_call"]["by_call"].items()),
            errors="\n".join(f"| {error} | {cases:,} |" for error, cases in figures["every_call"]["by_error"].items()),
            places=len(figures["deaths"]),
            fits="\n".join(
                f"| {name} | {fit['level']:.3f} | {fit['growth']:+.3f} | {tenths(fit)} |" for name, fit in fits
            ),
            h200=on_h200,
            on_the_gpu="; ".join(
                f"{name}: {run['tests']} tests, {run['findings']} findings"
                for name, run in figures["compute_sanitizer"]["runs"].items()
            ),
            known=known_failures(),
        )
    )


def with_tests(present: str) -> str:
    """The page with the table of known failures as it is now."""
    rows = re.compile(r"^\| (?:" + "|".join(KNOWN) + r") \|.*\n", re.MULTILINE)
    first = rows.search(present)
    assert first is not None
    return present[: first.start()] + known_failures() + "\n" + rows.sub("", present[first.start() :])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="only the table of known failures")
    PAGE.write_text(with_tests(PAGE.read_text()) if parser.parse_args().tests else page())
