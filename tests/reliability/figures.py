"""Figures that the tests of this folder measure, kept for docs/reliability.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "build" / "reliability"


def keep(name: str, figures: dict[str, Any]) -> None:
    """Keep the figures of a run under a name; the last run counts."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{name}: {json.dumps(figures)}")


def kept(name: str) -> dict[str, Any]:
    """What the last run kept; empty where there was none."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}
