"""Features of SGLang that its CPU engine has, with releases in between; tests/gpu/test_sglang_gpu.py has the others."""

from __future__ import annotations

from pathlib import Path

from . import checkpoint
from .conftest import Start


def test_experts(start: Start, tmp_path: Path) -> None:
    model = checkpoint.write(tmp_path / "model", config=checkpoint.MIXTRAL)
    server = start("--enable-weights-cpu-backup", model=model)
    server.check_cycles(server.generate)
    server.check_updates_while_released(checkpoint.write(tmp_path / "other", seed=8, config=checkpoint.MIXTRAL))
