"""Features of SGLang that its CPU engine has, with releases in between; tests/gpu/test_sglang_gpu.py has the others."""

from __future__ import annotations

from pathlib import Path

from . import checkpoint
from .conftest import Start


def test_experts(start: Start, tmp_path: Path) -> None:
    server = start("--enable-weights-cpu-backup", model=checkpoint.write(tmp_path, config=checkpoint.MIXTRAL))
    server.check_cycles(server.generate)
