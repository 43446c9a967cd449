"""tokenspeed's class ``Engine``, without memsaver's service."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.engine_server import free_port

from .server import ENVIRONMENT


def test_calls_for_memory(model: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.tokenspeed.engine_calls", str(model)],
        env={**os.environ, **ENVIRONMENT, "RENDEZVOUS_PORT": str(free_port())},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
