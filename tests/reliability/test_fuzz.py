"""Fuzzed requests, by the thousand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.amount import amount
from tests.reliability.figures import keep

RUNS = amount(60, long=400_000)


@pytest.mark.long
@pytest.mark.timeout(4000)
def test_whatever_is_sent_is_understood_or_refused() -> None:
    """Bodies, headers, signatures and the bytes of connections; `make fuzz` runs longer."""
    pytest.importorskip("atheris", reason="atheris has no wheel for this platform")
    result = subprocess.run(
        [sys.executable, "-m", "tests.reliability.fuzz", "--runs", str(RUNS), "--seconds", "3600"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MEMSAVER_DRIVER": "host"},
        capture_output=True,
        text=True,
        timeout=3900,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    figures = json.loads(result.stdout.splitlines()[-1])
    keep("fuzz", figures)
    assert figures["inputs"] > RUNS // 4
    assert min(*figures["of_each"].values(), figures["understood"], figures["refused"]) > RUNS // 36
