"""The steps that only vLLM's ranks have: each fails on every rank, in every way.

tests/reliability/test_ranks.py does the same with the steps that all engines have.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from memsaver_core import MemsaverError
from memsaver_core.contract.errors import GroupFailedError
from memsaver_core.contract.requests import MemoryRequest, Tagged
from memsaver_server.integrations.vllm.engine import VllmMemory
from memsaver_server.ranks import Deadlines
from tests.unit.test_vllm_plugin import ALL, Executor, Rank, group, released, workers

__all__ = ["group", "workers"]

RANKS = 2
#: The ranks are sent an expected release, vLLM puts its workers to sleep, and the ranks are asked for the outcome. vLLM
#: counts as asleep if a part was released before: the ranks are then sent SleepNow.
STEPS = ("ExpectRelease", "sleep", "TakeOutcome", "SleepNow")
CASES = list(itertools.product(STEPS, range(RANKS), (False, True)))
#: For ranks that are made to hang: a step that takes longer has hung. The steps take milliseconds.
HUNG_S = 3.0
#: Cases that each need workers of their own, which take a while to start.
DEADLY = [(step, rank, bool(rank)) for step in STEPS for rank in range(RANKS)]


def get_ready(memory: VllmMemory, step: str) -> None:
    if step == "SleepNow":
        memory.release(MemoryRequest(tags=("kv_cache",)))


@pytest.mark.parametrize(("step", "failing", "after"), CASES)
def test_a_step_that_fails_is_undone_on_every_rank(group: list[Rank], step: str, failing: int, after: bool) -> None:
    """The release can be repeated, and undone."""
    memory = VllmMemory(Executor(group))
    get_ready(memory, step)
    before = [released(rank) for rank in group]
    group[failing].arm(step, "error", after)
    with pytest.raises(MemsaverError, match="this rank was made to fail"):
        memory.release(MemoryRequest())
    assert [released(rank) for rank in group] == before
    memory.release(MemoryRequest())
    assert [released(rank) for rank in group] == [ALL, ALL]
    memory.resume(Tagged())
    assert all(content["weights"] and content["runtime"] for content in (rank.content() for rank in group))


@pytest.fixture
def groups() -> Iterator[list[list[Rank]]]:
    """For each of ``DEADLY`` a separate group."""
    names = [[f"fault{case}-{rank}-{os.getpid()}" for rank in range(RANKS)] for case in range(len(DEADLY))]
    groups = [[Rank(MEMSAVER_HOST_DEVICE=name) for name in each] for each in names]
    try:
        for rank in itertools.chain(*groups):
            rank.wait()  # so that no step competes with a start
        yield groups
    finally:
        for rank in itertools.chain(*groups):
            rank.kill()
    for name in itertools.chain(*names):
        Path(f"/dev/shm/memsaver-{os.getuid()}-{name}").unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["hang", "kill"])
def test_a_rank_that_hangs_or_dies_is_named_and_the_group_refuses_work(groups: list[list[Rank]], kind: str) -> None:
    """With the step in which it did, and nobody else."""

    def check(ranks: list[Rank], step: str, failing: int, after: bool) -> None:
        deadlines = Deadlines(HUNG_S, HUNG_S) if kind == "hang" else Deadlines()
        memory = VllmMemory(Executor(ranks), deadlines=deadlines)
        get_ready(memory, step)
        ranks[failing].arm(step, kind, after)
        with pytest.raises(GroupFailedError) as failed:
            memory.release(MemoryRequest())
        failure = str(failed.value)
        assert f"rank {failing} (process {ranks[failing].pid})" in failure
        assert f"process {ranks[1 - failing].pid}" not in failure
        assert "the release of kept content" in failure
        status = memory.status()
        assert (status.state, status.failure) == ("failed", failure)
        assert [each.alive for each in status.ranks] == [kind == "hang" or each != failing for each in range(RANKS)]
        with pytest.raises(GroupFailedError) as refused:
            memory.resume(Tagged())
        assert str(refused.value) == failure

    with ThreadPoolExecutor(len(DEADLY)) as pool:
        for case, ran in [(case, pool.submit(check, ranks, *case)) for case, ranks in zip(DEADLY, groups, strict=True)]:
            try:
                ran.result()
            except BaseException as error:
                error.add_note(f"step, rank, after the step took effect: {case}")
                raise
