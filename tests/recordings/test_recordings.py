"""Everything is as it was recorded, or was recorded anew."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.native import injection

from .__main__ import FILES, difference, names

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is recorded now."""
    folder = tmp_path_factory.mktemp("recorded")
    command = [sys.executable, "-m", "tests.recordings", "--to", str(folder)]
    environment = {**os.environ, "MEMSAVER_DRIVER": "host", **injection.in_child()}
    ran = forks.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


@pytest.mark.parametrize("name", sorted(names(FILES)))
def test_it_is_as_recorded(name: str, recorded: Path) -> None:
    found = difference(name, recorded)
    assert not found, "\n".join(
        [f"{name} is not as recorded. If that is meant: python -m tests.recordings --record", *found]
    )


def test_nothing_else_is_recorded(recorded: Path) -> None:
    assert names(recorded) == names(FILES)
