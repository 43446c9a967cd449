"""Two processes on two GPUs that keep their backups in one store; skipped with fewer."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu.children import ON_CUDA, nvlink_connects_two, two_devices
from tests.programs import Child
from tests.waiting import wait_until

pytestmark = [pytest.mark.gpu, two_devices]

GIB = 1 << 30

#: Memory on one GPU, equal in all that run this; does what it is told, and answers with a line of JSON.
REPLICA = """
import json, os, signal, sys, threading
import torch, memsaver_core as ms

index, size = int(sys.argv[1]), int(sys.argv[2])
device = ms.torch_device(index)

def make():
    torch.manual_seed(1)
    with ms.region("weights", restore="host", device=index):
        return [torch.empty(32 << 20, dtype=torch.bfloat16, device=device).normal_(0, 0.02) for _ in range(size >> 26)]

def checksums():
    return [int(tensor.view(torch.int64).sum()) for tensor in held]

def kill_in_the_middle():
    while True:
        now = ms.status().progress
        if now.operation == "release" and 0 < now.copied_bytes and now.done_bytes < now.total_bytes:
            os.kill(os.getpid(), signal.SIGKILL)

held = make()
written = checksums()
ms.prepare_backup(wait=True)
print(json.dumps(written), flush=True)
for order in sys.stdin:
    match order.strip():
        case "release":
            (tag,) = (tag for tag in ms.release().tags if tag.tag == "weights")
            answer = {"copied": tag.backed_up_bytes, "shared": tag.shared_bytes, "unchanged": tag.unchanged_bytes}
        case "hibernate":
            ms.release(hibernate=True)
            answer = ms.status().hibernated
        case "resume":
            ms.resume()
            answer = checksums() == written
        case "resume alone":
            (phase,) = ms.resume().phases
            answer = [checksums() == written, phase.details.get("linked_bytes", 0) / size]
        case "change":
            for tensor in held:
                tensor.view(torch.uint8)[0::2].bitwise_xor_(1)  # the lowest bit of each mantissa
            answer = written = checksums()
        case "be killed":
            threading.Thread(target=kill_in_the_middle, daemon=True).start()
            answer = True
        case "look":
            store = ms.status().host_backup.shared_store
            answer = {"used": store.used_bytes, "total": store.total_bytes, "processes": store.processes}
    print(json.dumps(answer), flush=True)
"""


class Replica(Child):
    def __init__(self, index: int, size: int, **settings: str) -> None:
        super().__init__("-c", REPLICA, str(index), str(size), **settings)

    def answer(self) -> Any:
        return json.loads(self.read_line())

    def tell(self, order: str) -> Any:
        self.say(order)
        return self.answer()


def both(replicas: list[Replica], order: str) -> list[Any]:
    for replica in replicas:
        replica.say(order)
    return [replica.answer() for replica in replicas]


def started(size: int, pack: str = "auto", *, apart: bool = False) -> Iterator[list[Replica]]:
    """Two replicas; with ``apart`` each sees its own GPU alone."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    settings = {**ON_CUDA, "MEMSAVER_SHARED_BACKUPS": name, "MEMSAVER_PACK": pack, "MEMSAVER_VERIFY": "full"}

    def on(gpu: int) -> Replica:
        if apart:
            return Replica(0, size, **settings, CUDA_VISIBLE_DEVICES=str(gpu))
        return Replica(gpu, size, **settings)

    with on(0) as one, on(1) as other:
        assert one.answer() == other.answer()  # the content is the same
        yield [one, other]


@pytest.fixture(params=["auto", "off"])
def replicas(request: pytest.FixtureRequest) -> Iterator[list[Replica]]:
    yield from started(GIB, request.param)


@pytest.fixture
def large_replicas() -> Iterator[list[Replica]]:
    """Large enough that a process can be killed in the middle of its copies."""
    yield from started(4 * GIB)


@pytest.mark.guards("each of several replicas pinned its own copy of the same weights")
def test_two_gpus_keep_one_copy(replicas: list[Replica], request: pytest.FixtureRequest) -> None:
    """Released together, each copies a part over its own link; both get everything back, again after a change."""
    packed = "auto" in request.node.callspec.id
    for cycle in range(3):
        if cycle:
            one, other = both(replicas, "change")
            assert one == other
        reports = both(replicas, "release")
        assert sum(report["copied"] for report in reports) == GIB
        assert all(report["copied"] + report["shared"] == GIB for report in reports)
        store = replicas[0].tell("look")
        assert store["processes"] == 2
        assert store["used"] <= (0.78 if packed else 1.01) * GIB
        assert both(replicas, "resume") == [True, True]
    assert [report["unchanged"] for report in both(replicas, "release")] == [GIB, GIB]
    assert both(replicas, "resume") == [True, True]


@pytest.fixture(params=[("auto", False), ("off", False), ("auto", True)], ids=["packed", "raw", "apart"])
def linked(request: pytest.FixtureRequest) -> Iterator[list[Replica]]:
    if not nvlink_connects_two():
        pytest.skip("needs NVLink")
    pack, apart = request.param
    yield from started(GIB, pack, apart=apart)


def comes_over_both(replica: Replica) -> bool:
    """Whether content comes over the other's link, too, as it does once the other has pinned it."""
    is_right, share = replica.tell("resume alone")
    assert is_right
    replica.tell("release")
    return bool(share > 0.25)


def test_a_process_whose_device_is_idle_lends_its_link(linked: list[Replica]) -> None:
    one, _ = linked
    both(linked, "release")
    wait_until(lambda: comes_over_both(one), 60)
    assert both(linked, "resume") == [True, True]
    one.tell("release")
    assert one.tell("resume alone") == [True, 0]  # the other uses its device


def test_both_sides_of_a_link_can_be_hibernated(linked: list[Replica]) -> None:
    """Nothing of the link is left: a process that is checkpointed with imported memory would be lost."""
    one, other = linked
    both(linked, "release")
    wait_until(lambda: comes_over_both(one), 60)
    assert other.tell("hibernate")
    assert one.tell("resume alone") == [True, 0]
    assert one.tell("hibernate")
    assert both(linked, "resume") == [True, True]
    both(linked, "release")
    wait_until(lambda: comes_over_both(other), 60)


def test_without_nvlink_no_link_is_lent(replicas: list[Replica]) -> None:
    if nvlink_connects_two():
        pytest.skip("needs GPUs without NVLink")
    one, _ = replicas
    both(replicas, "release")
    for _ in range(5):
        assert one.tell("resume alone") == [True, 0]
        one.tell("release")


@pytest.mark.guards("the process that had written a shared backup died")
def test_one_is_killed_in_the_middle_of_its_share(large_replicas: list[Replica]) -> None:
    """Copies of it are in flight then. The other copies what is missing, and gets all of its content back."""
    dying, other = large_replicas
    dying.tell("be killed")
    dying.say("release")
    other.say("release")
    assert dying.process.wait(60) == -signal.SIGKILL
    report = other.answer()
    assert report["copied"] + report["shared"] == 4 * GIB
    assert other.tell("resume")
    assert other.tell("look")["processes"] == 1
