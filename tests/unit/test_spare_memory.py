"""When the drop-in keeps pinned memory between a resume and the next pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from memsaver_core import _native
from memsaver_core.compat.torch_memory_saver import state

GIB = 1 << 30


@pytest.mark.parametrize(
    ("pressure", "available", "plentiful"),
    [
        ("some avg10=0.00 avg60=9.00 avg300=9.00 total=1\nfull avg10=0.00", 8 * GIB, True),
        ("some avg10=2.50 avg60=0.10 avg300=0.00 total=1\nfull avg10=0.00", 8 * GIB, False),
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00", 3 * GIB, False),
        (None, 8 * GIB, True),  # a kernel without it
    ],
)
def test_memory_is_plentiful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pressure: str | None, available: int, plentiful: bool
) -> None:
    file = tmp_path / "memory"
    if pressure is not None:
        file.write_text(pressure)
    monkeypatch.setattr(state, "_PRESSURE_FILE", file)
    monkeypatch.setattr(_native, "available_memory_bytes", lambda: available)
    assert state.is_plentiful(4 * GIB) is plentiful
