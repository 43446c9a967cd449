"""Engines that start with the weights that a killed one had."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from memsaver_server.client import Client
from memsaver_server.reference.builtin_model import small_checkpoint
from tests.programs import Child, output_of
from tests.reliability.test_keeper import Keeper, listed

from .serving import FORKED_RANKS, serving

#: In the log of an engine that loads its weights, with the reason.
FELL_BACK = "were loaded in the ordinary way"


@pytest.fixture
def store() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def keeper(store: str) -> Iterator[Keeper]:
    keeper = Keeper(store)
    yield keeper
    keeper.end(signal.SIGKILL)


def checkpoint(folder: Path) -> Path:
    """A copy of the built-in checkpoint."""
    return Path(shutil.copytree(small_checkpoint(), folder / "checkpoint"))


def damage(folder: Path) -> None:
    """Overwrite the weights with others, unnoticed by whoever does not read them."""
    file = folder / "model.safetensors"
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[-1_000_000:] = bytes(1_000_000)
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.usefixtures("keeper")
@pytest.mark.guards("the process that had written a shared backup died")
def test_the_next_engine_serves_without_reading_its_checkpoint(store: str, tmp_path: Path, ranks: int) -> None:
    folder = checkpoint(tmp_path)
    options = ("--model", str(folder), "--tensor-parallel", str(ranks))
    changes = {"MEMSAVER_SHARED_BACKUPS": store, "MEMSAVER_HOST_BACKUP_LIMIT": "1GiB"}

    def tokens(client: Client) -> list[int]:
        ids: list[int] = client.generate("Weights outlive their engine.", max_new_tokens=12)["output_ids"]
        return ids

    with serving(*options, changes=changes, program=FORKED_RANKS) as first, Client(first.url) as client:
        assert FELL_BACK in first.log
        expected = tokens(client)
        client.release()
        assert len(listed(store)) == ranks
        first.process.kill()
        first.process.wait(600)
    damage(folder)
    with serving(*options, changes=changes, program=FORKED_RANKS) as second, Client(second.url) as client:
        assert tokens(client) == expected
        client.release()
        client.resume()
        assert tokens(client) == expected
        assert FELL_BACK not in second.log
    # Without the store the damage shows.
    with serving(*options, program=FORKED_RANKS) as third, Client(third.url) as client:
        assert tokens(client) != expected


MODULE = """
import os, sys, torch
import memsaver_core as ms
from memsaver_server.integrations.module import ModuleEngine

model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 7))
model.requires_grad_(False).eval()
loads = []

def load():
    loads.append(1)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 97)

engine = ModuleEngine(model, weights=ms.WeightsKey("a module", "1"), load=load)
ms.release()
ms.resume()
print(len(loads), model(torch.ones(2, 300)).sum().item(), flush=True)
"""


@pytest.mark.usefixtures("keeper")
def test_a_module_engine_starts_from_the_store(store: str) -> None:
    changes = {"MEMSAVER_DRIVER": "host", "MEMSAVER_SHARED_BACKUPS": store}
    with Child("-c", MODULE + "sys.stdin.readline()", **changes) as first:
        loads, result = first.read_line().split()
        assert loads == "1"
    assert output_of(MODULE, **changes).split() == ["0", result]
