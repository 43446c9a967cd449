"""Random programs over the public API, compared with a model after every step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.figures import keep


@pytest.mark.slow
def test_random_programs_agree_with_the_model() -> None:
    """R4: repeats are success; R5, R8: after parts, the rest; R6: allocations while released live; B2: nothing
    is kept for what was freed. Longer by MEMSAVER_MACHINE_EXAMPLES and MEMSAVER_MACHINE_STEPS."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.reliability.machine"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-6000:]
    figures = json.loads(result.stdout.splitlines()[-1])
    keep("state_machine", figures)
    assert figures["steps"] > 1000
