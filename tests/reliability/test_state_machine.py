"""Random programs over the public API, compared with a model after every step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.figures import keep

ROOT = Path(__file__).parents[2]

#: A program that fails while it holds memory, and whose failure is still known to somebody when the next one runs.
FAILING = """
from tests.reliability.machine import Machine, a_device, replay

class Failing(Machine):
    def fail(self):
        memory = self.memories[0]
        assert memory.content() == b"", "meant to fail"

with a_device():
    try:
        replay([("allocate", {"tag": "a", "policy": "host", "pages": 3}), ("fail", {})], Failing())
    except AssertionError as error:
        kept = error
    replay([], Machine())
    print(kept)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.mark.slow
def test_random_programs_agree_with_the_model() -> None:
    """R4, R5, R6, R8, B2: repeats are success; after parts, the rest; allocations while released live; nothing
    is kept for what was freed. Longer by MEMSAVER_MACHINE_EXAMPLES and MEMSAVER_MACHINE_STEPS."""
    figures = json.loads(run("-m", "tests.reliability.machine").stdout.splitlines()[-1])
    keep("state_machine", figures)
    assert figures["steps"] > 1000


def test_a_program_that_fails_is_told_and_leaves_nothing_to_the_next() -> None:
    result = run("-c", FAILING)
    assert result.stdout == "meant to fail\n"
    assert "('allocate', {'tag': 'a', 'policy': 'host', 'pages': 3})" in result.stderr
    assert "AssertionError: meant to fail" in result.stderr
