"""The script of torch_memory_saver's README runs unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import output_of

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
    assert output_of(START, str(SCRIPT), mode, "2000000000").endswith("done\n")


def test_without_the_preload_library() -> None:
    """With ``install()`` only, in the default hook mode, in which torch_memory_saver itself cannot start."""
    start = "import runpy, sys, memsaver_core.compat as c; c.install(); sys.argv.pop(0); runpy.run_path(sys.argv[0])"
    output_of(start, str(SCRIPT), "preload", "2000000000")
