"""Fixtures of several files."""

from __future__ import annotations

import glob
import itertools
import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memsaver_server.ranks import Deadlines, RankMemory
from tests.reliability.rank_engine import RANKS, Group, Zygote

#: For ranks that are made to hang: a step that takes longer has hung. The steps take milliseconds.
HASTY = Deadlines(idle_s=3, prepare_s=3, communicators_s=2, hibernation_s=3)

Start = Callable[..., tuple[Group, RankMemory]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts an engine of some ranks with some deadlines and settings of the core; all of them end with the module's
    last test, so that no later test has their descriptors."""
    zygote = Zygote()
    groups: list[Group] = []
    prefix = f"ranks-{uuid.uuid4().hex[:8]}"
    numbers = itertools.count()

    def engine(ranks: int = RANKS, deadlines: Deadlines | None = None, **settings: Any) -> tuple[Group, RankMemory]:
        folder = tmp_path_factory.getbasetemp() / f"{prefix}-{next(numbers)}"
        folder.mkdir()
        group = zygote.fork(ranks, folder, settings)
        groups.append(group)
        return group, RankMemory(group.channel, deadlines=deadlines or Deadlines())

    yield engine
    for group in groups:
        group.kill()
    zygote.close()
    for path in glob.glob(f"/dev/shm/memsaver-{os.getuid()}-{prefix}-*"):
        os.unlink(path)
