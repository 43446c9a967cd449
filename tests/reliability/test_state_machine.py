"""Random programs over the public API, compared with a model after every step."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

import pytest

from tests import forks
from tests.native import injection
from tests.reliability.figures import keep
from tests.reliability.known_programs import KNOWN, read, written
from tests.reliability.random_programs import CORES, JOURNALS

ROOT = Path(__file__).parents[2]

#: A program that fails while it holds memory, with a reference to the failure alive when the next one runs.
FAILING = """
from tests.reliability.machine import Machine, replay, two_devices

class Failing(Machine):
    def fail(self):
        memory = self.memories[0]
        assert memory.content() is None, "meant to fail"

allocate = {"kind": ("a", "host", 0), "pages": [3], "content": "random", "faults": []}
with two_devices():
    try:
        replay([("allocate", allocate), ("fail", {})], Failing())
    except AssertionError as error:
        kept = error
    replay([], Machine())
    print(kept)
"""


def run(*arguments: str, timeout: float = 800, loaded: bool = True, **environment: str) -> CompletedProcess[str]:
    return forks.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        loaded=loaded,
    )


def run_programs(core: str, *options: str) -> dict[str, int]:
    """The figures of a run. If it fails, hangs or crashes, the current program is reported."""
    why = "it did not end"
    try:
        ran = run("-m", "tests.reliability.random_programs", "--core", core, *options, timeout=3000, loaded=False)
        if ran.returncode == 0:
            figures: dict[str, int] = json.loads(ran.stdout.splitlines()[-1])
            return figures
        why = ran.stdout + ran.stderr
    except TimeoutExpired:
        pass
    started = " ".join(("--core", core, *options))
    raise AssertionError(f"{why}\nThe last program, for {started} --replay FILE:\n{JOURNALS[core].read_text()}")


@pytest.mark.long
@pytest.mark.timeout(3600)  # it may have to build the core, and shorten a failing program
@pytest.mark.guards(
    "a second release or resume failed",
    "releasing everything failed after one tag had been released",
    "an allocation made under a released tag broke the resume",
    "freeing a released tensor released its memory twice",
    "resuming everything failed on tags that were never released",
    "host memory stayed resident after a resume, or freeing it slowed the resume",
)
def test_random_programs_agree_with_the_model() -> None:
    """Repeats succeed; after some tags come the rest; allocations under a released tag are usable; double frees are
    refused; nothing is kept of freed memory."""
    runs = [run_programs(core) for core in CORES]
    keep("state_machine", {name: round(sum(ran[name] for ran in runs), 1) for name in ("programs", "steps", "seconds")})
    assert sum(ran["steps"] for ran in runs) > 30 * sum(ran["programs"] - len(KNOWN) for ran in runs)


@pytest.mark.long
@pytest.mark.timeout(3600)  # it may have to build the core, and shorten a failing program
@pytest.mark.guards(
    "each of several replicas pinned its own copy of the same weights",
    "the process that had written a shared backup died",
)
def test_random_programs_of_a_process_that_shares_its_backups() -> None:
    """Two others release and resume equal content at the same time, and are killed; nothing of it is left at the
    end."""
    figures = run_programs("small", "--store")
    keep("state_machine_with_a_store", figures)
    assert figures["steps"] > 25 * (figures["programs"] - len(KNOWN))


def test_a_program_that_fails_is_told_and_leaves_nothing_to_the_next() -> None:
    result = run("-c", FAILING, **injection.in_child())
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout == "meant to fail\n"
    told = "".join(line for line in result.stderr.splitlines(keepends=True) if line.startswith("('"))
    assert [name for name, _ in read(told)] == ["begin", "allocate"]
    assert "AssertionError: meant to fail" in result.stderr


def test_a_program_can_be_written_down_and_read() -> None:
    for program in KNOWN.values():
        assert read(written(program)) == program
