"""NCCL communicators, on a library with NCCL's functions whose ranks really wait for each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memsaver_core as ms
from memsaver_core.communicators import nccl as loaded_nccl
from tests.native import nccl
from tests.native.nccl import PERSISTENT_BYTES, SUSPENDABLE_BYTES, Ranks

RESIDENT = "[device.process_bytes for device in ms.read_devices()][0]"
COUNTED = (
    "[(each.name, each.rank, each.suspendable_bytes, each.suspended_bytes, each.persistent_bytes, each.suspended) "
    "for each in communicators.found()]"
)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Ranks]:
    with nccl.started(2, tmp_path, names=("tp", "pp"), MEMSAVER_DRIVER="host") as ranks:
        yield ranks


def values(answers: list[str]) -> list[Any]:
    return [ast.literal_eval(answer) for answer in answers]


@pytest.mark.guards("idle NCCL communicators held gigabytes while the engine slept")
def test_all_ranks_suspend_and_resume(pair: Ranks) -> None:
    """The bytes are counted by NCCL, and gone from the process."""
    [before] = values(pair.ask(RESIDENT, [0]))
    for rank, counted in enumerate(values(pair.ask(COUNTED))):
        assert counted == [(name, rank, SUSPENDABLE_BYTES, 0, PERSISTENT_BYTES, False) for name in ("tp", "pp")]
    freed = {"tp": SUSPENDABLE_BYTES, "pp": SUSPENDABLE_BYTES}
    assert values(pair.ask("communicators.suspend()")) == [freed, freed]
    for rank, counted in enumerate(values(pair.ask(COUNTED))):
        assert counted == [(name, rank, 0, SUSPENDABLE_BYTES, PERSISTENT_BYTES, True) for name in ("tp", "pp")]
    [asleep] = values(pair.ask(RESIDENT, [0]))
    assert before - asleep >= 1.9 * SUSPENDABLE_BYTES
    assert values(pair.ask("communicators.suspend()")) == [{}, {}]  # a repeat is success
    assert pair.ask("communicators.resume()") == ["None", "None"]
    [awake] = values(pair.ask(RESIDENT, [0]))
    assert awake - asleep >= 1.9 * SUSPENDABLE_BYTES
    assert pair.ask("communicators.resume()") == ["None", "None"]


def test_they_are_a_tag_of_the_status(pair: Ranks) -> None:
    """Restored as they were, so their policy is shown as ``host``; the status has what was counted last."""
    tag = "[(t.tag, t.restore, t.state, t.bytes, t.resident_bytes, t.released_bytes) for t in ms.status().tags]"
    assert values(pair.ask(tag)) == [[], []]
    pair.ask("communicators.found()")
    both = 2 * SUSPENDABLE_BYTES
    assert values(pair.ask(tag)) == [[("communicators", "host", "resident", both, both, 0)]] * 2
    assert pair.ask("ms.status().state") == ["'resident'"] * 2
    pair.ask("communicators.suspend()")
    assert values(pair.ask(tag)) == [[("communicators", "host", "released", both, 0, both)]] * 2
    assert pair.ask("ms.status().state") == ["'released'"] * 2


def test_names_choose(pair: Ranks) -> None:
    assert values(pair.ask("communicators.suspend(['pp'])")) == [{"pp": SUSPENDABLE_BYTES}] * 2
    assert values(pair.ask("[each.suspended for each in communicators.statuses()]")) == [[False, True]] * 2
    assert pair.ask("communicators.resume(['pp', 'tp'])") == ["None"] * 2
    assert pair.ask("communicators.suspend(['dp'])", [0]) == [
        "UnsupportedError: this process has no communicator 'dp'; nothing was done"
    ]


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_rank_that_does_not_come_is_told(pair: Ranks) -> None:
    """The call ends at its deadline and names the communicator. When the rank comes after all, all of them can go
    back."""
    late = "MemsaverError: the suspend of communicator tp has not returned: another rank has not called it"
    [told] = pair.ask("communicators.suspend(timeout_s=0.3)", [0])
    assert told.startswith(late)
    [told] = pair.ask("communicators.found()[0].obstacle", [0])
    assert "has not returned" in told
    [told] = pair.ask("communicators.resume(timeout_s=0.1)", [0])
    assert told.startswith(late)
    [told] = pair.ask("communicators.suspend(timeout_s=0.3)", [1])  # meets rank 0 in tp, and waits for it in pp
    assert "the suspend of communicator pp has not returned" in told
    [told] = pair.ask("communicators.resume(['tp'], timeout_s=0.1)", [1])
    assert "the suspend of communicator pp has not returned" in told
    assert values(pair.ask("communicators.suspend(['pp'])", [0])) == [{"pp": SUSPENDABLE_BYTES}]
    assert pair.ask("communicators.resume()") == ["None", "None"]
    assert values(pair.ask("[each.suspended for each in communicators.found()]")) == [[False, False]] * 2


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_rank_that_died_is_told(pair: Ranks) -> None:
    pair.children[1].kill()
    [told] = pair.ask("communicators.suspend(timeout_s=0.3)", [0])
    assert "the suspend of communicator tp has not returned" in told
    assert pair.ask("ms.status().state", [0]) == ["'resident'"]


def test_an_error_of_nccl_names_the_communicator(pair: Ranks) -> None:
    """What was suspended before it can be resumed, by all ranks."""
    pair.ask("fail(comms['pp'], 'suspend', 5)")
    told = pair.ask("communicators.suspend()")
    expected = "MemsaverError: the suspend of communicator pp failed: ncclCommSuspend failed: invalid usage"
    assert told == [expected] * 2
    assert values(pair.ask("[each.suspended for each in communicators.found()]")) == [[True, False]] * 2
    assert pair.ask("communicators.resume()") == ["None"] * 2
    assert values(pair.ask("communicators.suspend()")) == [{"tp": SUSPENDABLE_BYTES, "pp": SUSPENDABLE_BYTES}] * 2


@pytest.mark.parametrize(
    ("version", "environment", "obstacle"),
    [
        (22809, {}, "NCCL 2.28.9 can neither suspend nor count it, so what it holds stays; install NCCL 2.29.7"),
        (23007, {"NCCL_CUMEM_ENABLE": "0"}, "NCCL_CUMEM_ENABLE=0, so what it holds stays; unset it"),
        (23007, {"MEMSAVER_COMMUNICATORS": "off"}, "MEMSAVER_COMMUNICATORS=off; unset it"),
    ],
)
@pytest.mark.guards("idle NCCL communicators held gigabytes while the engine slept")
def test_what_prevents_it_is_told_with_what_to_do(
    tmp_path: Path, version: int, environment: dict[str, str], obstacle: str
) -> None:
    """Nothing is entered, so no rank waits for another."""
    with nccl.started(2, tmp_path, version=version, MEMSAVER_DRIVER="host", **environment) as ranks:
        [told] = ranks.ask("communicators.found()[0].obstacle", [0])
        assert told.startswith(f"'{obstacle}")
        [told] = ranks.ask("communicators.suspend(['tp'])", [0])
        assert told.startswith(f"UnsupportedError: communicator tp: {obstacle}")
        assert told.endswith("nothing was suspended")
        assert ranks.ask("communicators.suspend()", [0]) == ["{}"]


def test_one_rank_alone_shares_nothing(tmp_path: Path) -> None:
    with nccl.started(1, tmp_path, MEMSAVER_DRIVER="host") as ranks:
        assert ranks.ask("communicators.found()") == ["()"]


def test_a_name_is_taken_once_and_freed(pair: Ranks) -> None:
    again = "communicators.register('tp', comms['tp'], ranks=2, rank=0)"
    [told] = pair.ask(again, [0])
    assert told.startswith("ConfigurationError: a communicator 'tp' is registered already")
    pair.ask("communicators.unregister('tp')", [0])
    assert values(pair.ask("[each.name for each in communicators.found()]", [0])) == [["pp"]]
    assert pair.ask(again, [0]) == ["None"]


def test_regions_do_not_take_the_tag() -> None:
    with pytest.raises(ms.ConfigurationError, match="the tag 'communicators' is of what NCCL holds"):
        ms.region("communicators")


def test_nothing_is_loaded_for_it() -> None:
    """A process without NCCL has none afterwards either."""
    assert loaded_nccl.loaded_paths() == ()
    assert loaded_nccl.loaded() is None
