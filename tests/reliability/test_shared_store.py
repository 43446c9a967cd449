"""Several processes that keep their backups in one store: one copy, whatever becomes of the others."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memsaver_core import _native
from memsaver_core.contract.errors import ConfigurationError
from tests import forks
from tests.amount import amount
from tests.native import injection
from tests.programs import Child, Ordered
from tests.reliability.replica import UNIT, WEIGHTS
from tests.unit.saver_memory import MIB
from tests.waiting import wait_until

CYCLES = amount(0, long=1000)
PATIENCE_S = 1.0  # kOthersTimeout of csrc/backup/save.cpp: how long a process waits for another one's part


class Replica(Ordered):
    """A process with memory, which does what it is told; see replica.py."""

    def __init__(self, store: str, **settings: Any) -> None:
        super().__init__(
            "-m", "tests.reliability.replica", store, json.dumps(settings), **injection.in_child(small=True)
        )


@pytest.fixture
def store() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def replicas(store: str) -> Iterator[list[Replica]]:
    """Three replicas with equal content."""
    three = [Replica(store) for _ in range(3)]
    for each in three:
        each.tell("write", 7)
    for each in three:
        each.answer()
    yield three
    for each in three:
        each.kill()


def all_at_once(replicas: list[Replica], operation: str) -> list[Any]:
    for each in replicas:
        each.tell(operation)
    return [each.answer() for each in replicas]


def written_and_released(replicas: list[Replica], seeds: Iterator[int]) -> list[Any]:
    """The reports of a release after a change of the content. If one process does not run for ``PATIENCE_S``, the
    others write its part, too: then all of it is done again with other content."""
    while True:
        seed, began = next(seeds), time.monotonic()
        for each in replicas:
            each.does("write", seed)
        reports = all_at_once(replicas, "release")
        if sum(report["backed_up_bytes"] for report in reports) == WEIGHTS or time.monotonic() - began < PATIENCE_S:
            return reports
        assert all_at_once(replicas, "resume") == [True] * 3


@pytest.mark.guards("each of several replicas pinned its own copy of the same weights")
def test_replicas_keep_one_copy(replicas: list[Replica]) -> None:
    """Released together, each copies a part; content that changed is written anew."""
    seeds = itertools.count(7)
    for _ in range(2):
        reports = written_and_released(replicas, seeds)
        assert sum(report["backed_up_bytes"] for report in reports) == WEIGHTS
        assert all(report["backed_up_bytes"] + report["shared_bytes"] == WEIGHTS for report in reports)
        status = replicas[0].does("status")
        assert status["processes"] == 3
        assert status["held_bytes"] == status["used_bytes"] <= 1.01 * WEIGHTS
        assert status["used_bytes"] <= status["total_bytes"] <= status["limit_bytes"]
        assert abs(3 * status["share_bytes"] - status["held_bytes"]) < UNIT
        assert all_at_once(replicas, "resume") == [True] * 3
    # One changes its content: the others' is not touched.
    replicas[1].does("write", next(seeds))
    assert [report["unchanged_bytes"] for report in all_at_once(replicas, "release")] == [WEIGHTS, 0, WEIGHTS]
    assert all_at_once(replicas, "resume") == [True] * 3
    assert all_at_once(replicas, "audit") == [[]] * 3


#: Holds content unlike that of others with another seed; does what it is told, and answers with a line of JSON.
BORROWER = """
import json, sys
import torch, memsaver_core as ms
from memsaver_core import process

torch.manual_seed(int(sys.argv[1]))
with ms.region("weights", restore="host"):
    held = [torch.empty(8 << 20, dtype=torch.uint8, device=ms.torch_device()).random_() for _ in range(36)]
written = [int(tensor.view(torch.int64).sum()) for tensor in held]
print(flush=True)
for order in sys.stdin:
    match order.strip():
        case "release":
            ms.release()
            answer = True
        case "hibernate":
            ms.release(hibernate=True)
            answer = ms.status().hibernated
        case "resume":
            process.saver().delay("copy_to_device", 0.02)  # else it may be done before a link is open
            details = [phase.details for phase in ms.resume().phases]
            process.saver().heal()
            assert [int(tensor.view(torch.int64).sum()) for tensor in held] == written
            answer = sum(each.get("linked_bytes", 0) for each in details)
    print(json.dumps(answer), flush=True)
"""


def test_both_sides_of_a_link_can_be_hibernated(store: str) -> None:
    """Nothing of a link is left in either process: its content comes back then, too, and links are lent again."""

    def on(device: str, seed: int) -> Child:
        settings = {"MEMSAVER_DRIVER": "host", "MEMSAVER_HOST_DEVICE": f"{device}-{store}", "MEMSAVER_PACK": "off"}
        settings["MEMSAVER_SHARED_BACKUPS"] = store
        return Child("-c", BORROWER, str(seed), **injection.in_child(), **settings)

    def tell(child: Child, order: str) -> Any:
        return json.loads(child.ask(order))

    with on("one", 1) as borrower, on("two", 2) as lender:
        for each in (borrower, lender):
            each.read_line()
            tell(each, "release")

        def borrows() -> bool:
            linked = tell(borrower, "resume")
            tell(borrower, "release")
            return bool(linked > 0)

        wait_until(borrows, 60)  # the lender first pins what it has not written itself
        assert tell(lender, "hibernate")
        assert not borrows()
        assert tell(borrower, "hibernate")
        assert tell(borrower, "resume") == 0
        assert tell(lender, "resume") == 0
        for each in (borrower, lender):
            tell(each, "release")
        wait_until(borrows, 60)


@pytest.mark.guards("the process that had written a shared backup died")
def test_the_others_keep_what_a_dead_process_wrote(replicas: list[Replica]) -> None:
    writer, *others = replicas
    assert writer.does("release")["backed_up_bytes"] == WEIGHTS
    for report in all_at_once(others, "release"):
        assert report["shared_bytes"] == WEIGHTS
    writer.kill()
    assert all_at_once(others, "resume") == [True] * 2
    wait_until(lambda: others[0].does("status")["processes"] == 2)
    others[1].kill()
    wait_until(lambda: others[0].does("status")["processes"] == 1)
    assert others[0].does("release")["unchanged_bytes"] == WEIGHTS
    assert others[0].does("resume")
    status = others[0].does("status")
    assert status["share_bytes"] == status["held_bytes"] == status["used_bytes"]


@pytest.mark.guards("the process that had written a shared backup died")
@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_one_ends_in_the_middle_of_its_share(replicas: list[Replica], end: str) -> None:
    """The others copy what it had claimed."""
    dying, *others = replicas
    dying.does("hold")
    dying.tell("release")
    wait_until(lambda: others[0].does("status")["used_bytes"] > 0)  # it has claimed a block
    for each in others:
        each.tell("release")
    if end == "killed":
        dying.kill()
    else:
        os.kill(dying.process.pid, signal.SIGSTOP)
    reports = [each.answer() for each in others]
    assert sum(report["backed_up_bytes"] for report in reports) >= WEIGHTS
    assert all_at_once(others, "resume") == [True] * 2
    assert all_at_once(others, "audit") == [[]] * 2


@pytest.mark.parametrize("kernels", ["kernels", "no kernels"])
def test_one_that_does_not_pack_unpacks_what_others_packed(store: str, kernels: str) -> None:
    """On the device if it can, which the resume prepares unless a release has."""
    packing = Replica(store)
    plain = Replica(store, pack=False)
    try:
        if kernels == "no kernels":
            plain.does("fail", "has_packing")
        for each in (packing, plain):
            each.does("write weights", 3)
        assert packing.does("release")["kept_bytes"] < 0.9 * WEIGHTS
        assert plain.does("release")["shared_bytes"] == WEIGHTS
        assert all_at_once([packing, plain], "resume") == [True, True]
        assert plain.does("count", "prepare_packing") > 0 or kernels == "kernels"
        assert (plain.does("count", "unpack") > 0) == (kernels == "kernels")
        assert all_at_once([packing, plain], "audit") == [[]] * 2
    finally:
        packing.kill()
        plain.kill()


def test_it_is_bounded_for_all_together(store: str) -> None:
    """The limit holds for the store, not for each process; what does not fit is refused and undone."""
    first = Replica(store, host_backup_limit=int(1.5 * WEIGHTS))
    second = Replica(store, host_backup_limit=int(1.5 * WEIGHTS))
    try:
        first.does("write", 1)
        second.does("write", 2)
        assert first.does("release")["backed_up_bytes"] == WEIGHTS
        assert "limit of the shared store" in second.does("release")
        assert second.does("resume")  # it is resident, with its content
        second.does("write", 1)
        assert second.does("release")["shared_bytes"] == WEIGHTS
        assert [first.does("resume"), second.does("resume")] == [True, True]
    finally:
        first.kill()
        second.kill()


@pytest.mark.long
@pytest.mark.skipif(not CYCLES, reason="only `make test-long` runs it: in a few cycles, growth is noise")
@pytest.mark.timeout(1800)  # it may have to build the core
def test_nothing_grows_over_many_cycles(tmp_path: Path) -> None:
    """Of three processes that share packed content, on the core with small units: memory, files, threads, the store."""
    program = Path(__file__).parents[2] / "benchmarks" / "store_soak.py"
    options = ("--cycles", str(CYCLES), "--weights", "1MiB", "--out", str(tmp_path))
    environment = os.environ | injection.in_child(small=True) | {"MEMSAVER_DRIVER": "host"}
    output = forks.run([sys.executable, str(program), *options], env=environment, capture_output=True, text=True)
    assert output.returncode == 0, output.stdout + output.stderr
    figures = json.loads((tmp_path / "store-soak-host.json").read_text())
    assert figures["shared_bytes"] > 0
    assert figures["kept_bytes"] < figures["backed_up_bytes"]


def test_a_name_that_cannot_be_used() -> None:
    with pytest.raises(ConfigurationError, match="MEMSAVER_SHARED_BACKUPS"):
        _native.Saver(driver="host", host_capacity=MIB, shared_backups="a/b")
