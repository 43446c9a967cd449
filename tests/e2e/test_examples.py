"""The scripts under examples/ run to their end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.amount import amount

from .serving import environment

EXAMPLES = Path(__file__).parents[2] / "examples"
STEP = re.compile(r"step \d+: (?:engine )?released (\d+) MiB, train(?:ed with|er resumed) (\d+) MiB, reward")


STEPS = amount(1, long=4)
#: Runs a script whose engine is a fork; its trainer starts by itself.
WITH_FORKS = """
import os, runpy, subprocess, sys
from tests import forks
subprocess.Popen = forks.Popen
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
@pytest.mark.parametrize("script", ["rl_loop.py", "trainer_in_turns.py"])
def test_engine_and_trainer_take_turns_on_a_device_that_has_not_room_for_both(script: str) -> None:
    capacity_mib = 128
    ran = forks.run(
        [sys.executable, "-c", WITH_FORKS, str(EXAMPLES / script), "--steps", str(STEPS)],
        capture_output=True,
        text=True,
        env=environment({"MEMSAVER_HOST_CAPACITY": f"{capacity_mib}MiB"}),
    )
    assert ran.returncode == 0, ran.stderr
    steps = STEP.findall(ran.stdout)
    assert len(steps) == STEPS
    for released, trained in steps:
        assert int(released) + int(trained) > capacity_mib
