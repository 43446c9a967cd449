"""Figures measured by tests, kept until `python -m tests.reliability.document --record` records them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "build" / "reliability"


def keep(name: str, figures: dict[str, Any]) -> None:
    """Keep the figures of a run under a name, in place of earlier ones."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{name}: {json.dumps(figures)}")


def kept(name: str) -> dict[str, Any]:
    """The figures of the last run; empty if there was none."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}
