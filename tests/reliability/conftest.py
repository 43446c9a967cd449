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

#: A step that takes longer has hung. The steps take milliseconds; the machine may be busy.
HUNG_S = 3.0

Start = Callable[..., tuple[Group, RankMemory]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts an engine of some ranks with some settings of the core; all of them end with the module's last test, so
    that no later test has their descriptors."""
    zygote = Zygote()
    groups: list[Group] = []
    prefix = f"ranks-{uuid.uuid4().hex[:8]}"
    numbers = itertools.count()

    def engine(ranks: int = RANKS, **settings: Any) -> tuple[Group, RankMemory]:
        folder = tmp_path_factory.getbasetemp() / f"{prefix}-{next(numbers)}"
        folder.mkdir()
        group = zygote.fork(ranks, folder, settings)
        groups.append(group)
        return group, RankMemory(group.channel, deadlines=Deadlines(HUNG_S, HUNG_S, HUNG_S / 1.5, HUNG_S))

    yield engine
    for group in groups:
        group.kill()
    zygote.close()
    for path in glob.glob(f"/dev/shm/memsaver-{os.getuid()}-{prefix}-*"):
        os.unlink(path)
