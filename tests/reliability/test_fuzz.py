"""Fuzzed requests, by the thousand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.figures import keep


@pytest.mark.slow
def test_whatever_is_sent_is_understood_or_refused() -> None:
    """Bodies, headers, signatures and the bytes of connections; `make fuzz` runs longer."""
    pytest.importorskip("atheris", reason="atheris has no wheel for this platform")
    result = subprocess.run(
        [sys.executable, "-m", "tests.reliability.fuzz", "--runs", "36000", "--seconds", "200"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MEMSAVER_DRIVER": "host"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    figures = json.loads(result.stdout.splitlines()[-1])
    keep("fuzz", figures)
    assert figures["inputs"] > 10_000
    assert min(figures["of_each"].values()) > 1000
    assert figures["understood"] > 1000
    assert figures["refused"] > 1000
