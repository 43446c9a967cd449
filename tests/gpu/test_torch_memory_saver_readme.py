"""A script that uses torch_memory_saver as its README shows, and knows nothing of memsaver, runs unchanged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).parents[1] / "data/torch_memory_saver_script.py"

# As an engine starts a worker.
START = """
import memsaver_core.compat
memsaver_core.compat.install(subprocesses=True)
import subprocess, sys
from contextlib import nullcontext
from torch_memory_saver import configure_subprocess
with configure_subprocess() if sys.argv[2] == "preload" else nullcontext():
    sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
"""


@pytest.mark.parametrize("mode", ["preload", "torch"])
def test_in_a_worker(mode: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", START, str(SCRIPT), mode, "2000000000"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
    assert ran.stdout.endswith("done\n")


def test_without_the_preload_library() -> None:
    """After ``install()`` alone, in the default hook mode: torch_memory_saver itself cannot start so."""
    start = "import runpy, sys, memsaver_core.compat as c; c.install(); sys.argv.pop(0); runpy.run_path(sys.argv[0])"
    ran = subprocess.run(
        [sys.executable, "-c", start, str(SCRIPT), "preload", "2000000000"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout}\n{ran.stderr}"
