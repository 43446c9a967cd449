"""An engine of four processes: every step of an operation fails on every rank, in every way.

Afterwards all ranks are as before, or the group says that it has failed, and names the rank and the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from memsaver_core import MemsaverError
from memsaver_core.contract.errors import DriverError, GroupFailedError
from memsaver_core.contract.requests import MemoryRequest, Tagged
from memsaver_core.ranks.protocol import Plain
from memsaver_server.ranks import Deadlines, RankMemory
from tests.reliability.conftest import HASTY, Start
from tests.reliability.rank_engine import KEPT, RANKS

#: The steps as the ranks' messages call them, and as errors do.
RELEASE = {
    "prepare release": "preparation",
    "release kept": "release of kept content",
    "communicators release": "suspend of communicators",
    "release discarded": "release of discarded content",
    "lock": "lock",
    "checkpoint": "checkpoint",
}
RESUME = {
    "prepare resume": "preparation",
    "restore": "restore",
    "unlock": "unlock",
    "communicators resume": "resume of communicators",
    "resume": "resume",
}
RESERVE = {"Reserve": "reservation"}
STEPS = {**RELEASE, **RESUME, **RESERVE}
#: The steps that undo others.
UNDONE_BY = {
    "release kept": "resume",
    "communicators release": "communicators resume",
    "release discarded": "resume",
    "lock": "unlock",
    "checkpoint": "restore",
    "restore": "checkpoint",
    "unlock": "lock",
    "communicators resume": "communicators release",
    "resume": "release kept",
    "Reserve": "GiveBackReserved",
}


def deadlines(step: str, kind: str) -> Deadlines:
    """Short ones if ranks wait for one that hangs, or does not come to a collective call."""
    return HASTY if kind == "hang" or "communicators" in step else Deadlines()


def get_ready(memory: RankMemory, step: str) -> None:
    if step not in RELEASE:
        memory.release(MemoryRequest(hibernate=step in RESUME))


def operate(memory: RankMemory, step: str) -> None:
    if step in RELEASE:
        memory.release(MemoryRequest(hibernate=True))
    elif step in RESUME:
        memory.resume(Tagged())
    else:
        memory.reserve(Tagged())


def kept(states: list[Plain]) -> list[Plain]:
    """The states without content that nothing promises to keep."""
    return [
        {**state, "content": {tag: digest for tag, digest in state["content"].items() if tag in KEPT}}
        for state in states
    ]


def each_case(check: Callable[..., None], *cases: Sequence[Any]) -> None:
    """Check every combination, all at once, as most of the time is waiting."""
    combinations = list(itertools.product(*cases))
    with ThreadPoolExecutor(len(combinations)) as pool:
        for case, ran in [(case, pool.submit(check, *case)) for case in combinations]:
            try:
                ran.result()
            except BaseException as error:
                error.add_note(f"rank, after the step took effect: {case}")
                raise


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.guards(
    "one rank or device failed while the others went on",
    "a rank did not come to a collective suspend, and the others waited for ever",
    "checkpointing one rank of several hung the next one",
)
def test_a_step_that_fails_is_undone_on_every_rank(start: Start, step: str) -> None:
    """Content included. The operation can be repeated, and undone."""

    def check(rank: int) -> None:
        group, memory = start(deadlines=deadlines(step, "error"))
        resident = group.look()
        for after in (False, True):
            get_ready(memory, step)
            before = group.look()
            group.arm(rank, step, "error", after=after)
            with pytest.raises(DriverError, match=f"^rank {rank}: "):
                operate(memory, step)
            assert kept(group.look()) == kept(before)
            assert memory.status().state == ("resident" if step in RELEASE else "released")
            operate(memory, step)
            memory.resume(Tagged())
            assert kept(group.look()) == kept(resident)
        group.kill()

    each_case(check, range(RANKS))


@pytest.mark.parametrize("kind", ["hang", "kill"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.guards(
    "one rank or device failed while the others went on",
    "an operation waited forever, and nothing said why",
    "a rank did not come to a collective suspend, and the others waited for ever",
    "checkpointing one rank of several hung the next one",
    "a rank was killed while memory was released, and probes went on saying that it was well",
)
def test_a_rank_that_hangs_or_dies_is_named_and_the_group_refuses_work(start: Start, step: str, kind: str) -> None:
    """With the step in which it did; what the other ranks hold is still told."""

    def check(rank: int, after: bool) -> None:
        group, memory = start(deadlines=deadlines(step, kind))
        get_ready(memory, step)
        group.arm(rank, step, kind, after=after)
        with pytest.raises(GroupFailedError) as failed:
            operate(memory, step)
        assert f"rank {rank} (process {group.pids[rank]})" in str(failed.value)
        assert f"the {STEPS[step]}" in str(failed.value)
        status = memory.status()
        assert (status.state, status.failure) == ("failed", str(failed.value))
        assert [each.alive for each in status.ranks] == [kind == "hang" or each != rank for each in range(RANKS)]
        assert sum(tag.bytes for tag in status.tags) >= (RANKS - 1) * (1 << 18)
        for refused in (lambda: memory.release(MemoryRequest()), lambda: memory.resume(Tagged())):
            with pytest.raises(MemsaverError) as again:
                refused()
            assert str(again.value) == str(failed.value)
        group.kill()

    each_case(check, range(RANKS), (False, True))


@pytest.mark.parametrize("step", UNDONE_BY)
@pytest.mark.guards(
    "one rank or device failed while the others went on", "an operation waited forever, and nothing said why"
)
def test_a_step_that_cannot_be_undone_is_told(start: Start, step: str) -> None:
    """One rank fails the step, another one its undo: the group has failed, names both, and refuses work."""

    def check(ranks: tuple[int, int], kind: str) -> None:
        failing, stuck = ranks
        group, memory = start(deadlines=deadlines(step, kind))
        get_ready(memory, step)
        group.arm(failing, step, "error", after=False)
        group.arm(stuck, UNDONE_BY[step], kind, after=False)
        with pytest.raises(GroupFailedError) as failed:
            operate(memory, step)
        told = str(failed.value)
        assert f"rank {stuck}" in told
        assert STEPS[step] in told
        if kind == "error":
            assert f"rank {failing}: " in told
            assert f"the {STEPS[step]} cannot be undone" in told
        else:
            assert f"undoing of the {STEPS[step]}" in told
        assert memory.status().state == "failed"
        with pytest.raises(MemsaverError) as again:
            memory.resume(Tagged())
        assert str(again.value) == told
        group.kill()

    each_case(check, ((0, 1), (3, 2)), ("error", "hang", "kill"))
