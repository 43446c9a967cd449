"""Two ranks of plain torch on two GPUs: communicators suspended, both processes hibernated, and all of it back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
import torch

from tests.gpu import plain_ranks
from tests.gpu.children import two_devices
from tests.native.nccl import Ranks

pytestmark = [pytest.mark.gpu, two_devices]

MIB = 1 << 20
CYCLES = 50
ASLEEP = ["ms.release()", "communicators.suspend()", "hibernation.lock()", "hibernation.checkpoint()"]
AWAKE = ["hibernation.restore()", "hibernation.unlock()", "communicators.resume()", "ms.resume()"]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Ranks]:
    with plain_ranks.started(2, tmp_path) as ranks:
        yield ranks


def used_mib() -> list[float]:
    """Device memory in use by all processes, MiB, as nvidia-smi shows it; of the two devices."""
    pynvml.nvmlInit()
    uuids = [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(2)]
    handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    return [pynvml.nvmlDeviceGetMemoryInfo(each, version=pynvml.nvmlMemory_v2).used / MIB for each in handles]


def obstacle(pair: Ranks) -> str:
    [told, *_] = pair.ask("[each.obstacle for each in communicators.found()]")
    [only] = ast.literal_eval(told)
    return str(only)


def done(answers: list[str]) -> None:
    """No rank failed."""
    assert not [answer for answer in answers if "Error" in answer], answers


@pytest.mark.guards(
    "idle NCCL communicators held gigabytes while the engine slept",
    "checkpointing one rank of several hung the next one",
    "replaying a graph with NCCL hung after a remap",
)
def test_a_captured_all_reduce_replays_after_every_cycle(tmp_path: Path) -> None:
    empty = used_mib()
    with plain_ranks.started(2, tmp_path) as pair:
        if reason := obstacle(pair):
            pytest.skip(reason)
        assert pair.ask("replayed(1)") == [str(plain_ranks.total_over(2, 1))] * 2
        awake = [now - before for now, before in zip(used_mib(), empty, strict=True)]
        left = []
        for cycle in range(2, CYCLES + 2):
            for step in ASLEEP:
                done(pair.ask(step))
            left.append([now - before for now, before in zip(used_mib(), empty, strict=True)])
            for step in AWAKE:
                done(pair.ask(step))
            expected = [str(plain_ranks.total_over(2, cycle))] * 2
            assert (pair.ask(f"replayed({cycle})"), pair.ask(f"reduced({cycle})")) == (expected, expected), cycle
        print(f"MiB on each GPU: awake {awake}, asleep at most {[max(each) for each in zip(*left, strict=True)]}")
        assert max(map(max, left)) <= 16


def test_suspended_memory_is_the_driver_s(pair: Ranks) -> None:
    """By each device's own count, without a hibernation."""
    if reason := obstacle(pair):
        pytest.skip(reason)
    before = used_mib()
    freed = [sum(ast.literal_eval(answer).values()) / MIB for answer in pair.ask("communicators.suspend()")]
    asleep = used_mib()
    done(pair.ask("communicators.resume()"))
    print(f"MiB suspended: {freed}")
    assert all(was - now >= 0.95 * size > 0 for was, now, size in zip(before, asleep, freed, strict=True))
    assert pair.ask("replayed(5)") == [str(plain_ranks.total_over(2, 5))] * 2


def test_an_old_nccl_is_told_and_nothing_hangs(pair: Ranks) -> None:
    """torch 2.11 brings NCCL 2.28.9, which can neither suspend nor count."""
    if not obstacle(pair):
        pytest.skip("this NCCL can suspend")
    assert "install NCCL 2.29.7 or later" in obstacle(pair)
    assert pair.ask("communicators.suspend()") == ["{}"] * 2
    for told in pair.ask("ms.release(hibernate=True)"):
        assert told.startswith("UnsupportedError: this process cannot be hibernated: communicator torch:")
        assert "nothing was released" in told
    assert pair.ask("replayed(3)") == [str(plain_ranks.total_over(2, 3))] * 2
