"""Features of SGLang that its CPU engine has, with releases in between; tests/gpu/test_sglang_gpu.py has the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.waiting import wait_until

from . import checkpoint
from .conftest import Start


def test_experts(start: Start, tmp_path: Path) -> None:
    server = start("--enable-weights-cpu-backup", model=checkpoint.write(tmp_path, config=checkpoint.MIXTRAL))
    server.check_cycles(server.generate)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake"], "the decode side"),
        (["--dp", "2"], "one of 2 data-parallel replicas"),
    ],
)
def test_refused_at_the_start(start: Start, arguments: list[str], why: str) -> None:
    server = start(*arguments, wait=False)
    wait_until(server.is_dead, 240)
    assert f"SGLang's scheduler cannot be served: it is {why}" in server.output()
