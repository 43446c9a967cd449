"""Engines of one store that are given the same new weights while they sleep."""

from __future__ import annotations

import shutil
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from memsaver_server.client import Client
from memsaver_server.client.errors import InvalidRequestError
from memsaver_server.reference.builtin_model import small_checkpoint
from memsaver_server.reference.weights import fill_random
from tests.reliability.test_keeper import listed
from tests.waiting import wait_until

from .serving import FORKED_RANKS, Server, memsaver, serving
from .test_warm_start import damage

#: ``memsaver``, which notes each checkpoint that it loads in the file LOADS, and then waits while the file HELD exists.
COUNTING = (
    sys.executable,
    "-c",
    """
import os, time
from memsaver_server.reference import weights

load = weights.load_checkpoint

def counted(folder, *rest):
    with open(os.environ["LOADS"], "a") as file:
        print(os.getpid(), folder.name, file=file)
    while os.path.exists(os.environ["HELD"]):
        time.sleep(0.01)
    return load(folder, *rest)

weights.load_checkpoint = counted
from memsaver_server.cli import main
main()
""",
)


class Replica(Client):
    """A client of an engine, which sleeps at first."""

    def __init__(self, server: Server) -> None:
        super().__init__(server.url)
        self.server = server
        self.release()

    def update(self, folder: Path, version: str | None = "step-1") -> None:
        self.update_weights_from_disk(str(folder), version=version)

    def tokens(self, version: str | None = "step-1") -> list[int]:
        """What it generates once it is awake."""
        self.resume(weights_version=version)
        ids: list[int] = self.generate("One update for all replicas.", max_new_tokens=12)["output_ids"]
        return ids


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A checkpoint with new weights."""
    folder = Path(shutil.copytree(small_checkpoint(), tmp_path / "trained"))
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    fill_random(model, 99)
    model.save_pretrained(folder)
    return folder


class Replicas:
    """Two replicas, and the process ids of those that have loaded the trained weights."""

    def __init__(self, folder: Path, programs: ExitStack) -> None:
        self._loads, self.held = folder / "loads", folder / "held"
        changes = {
            "MEMSAVER_SHARED_BACKUPS": f"test-{uuid.uuid4().hex[:12]}",
            "MEMSAVER_HOST_BACKUP_LIMIT": "1GiB",
            "LOADS": str(self._loads),
            "HELD": str(self.held),
        }
        servers = [programs.enter_context(serving(changes=changes, program=COUNTING)) for _ in range(2)]
        self.first, self.second = [programs.enter_context(Replica(each)) for each in servers]
        self._pool = programs.enter_context(ThreadPoolExecutor())

    def loads(self) -> list[int]:
        rows = [line.split() for line in self._loads.read_text().splitlines()]
        return [int(process) for process, folder in rows if folder == "trained"]

    def both_update(self, folder: Path) -> tuple[Future[None], Future[None]]:
        """Begin an update of both; the first loads, until ``held`` is gone, and the second waits for it."""
        self.held.touch()
        first = self._pool.submit(self.first.update, folder)
        wait_until(lambda: self.loads() == [self.first.server.process.pid])
        second = self._pool.submit(self.second.update, folder)
        wait_until(lambda: self.second.occupation().updating)
        return first, second


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    with ExitStack() as programs:
        yield Replicas(tmp_path, programs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_second_replica_does_not_read_the_files(trained: Path, ranks: int) -> None:
    """It has equal tokens, and so has one that is given the same version again. Another version is read."""
    options = ("--tensor-parallel", str(ranks))
    changes = {"MEMSAVER_SHARED_BACKUPS": f"test-{uuid.uuid4().hex[:12]}", "MEMSAVER_HOST_BACKUP_LIMIT": "1GiB"}
    with ExitStack() as programs:
        servers = [programs.enter_context(serving(*options, changes=changes, program=FORKED_RANKS)) for _ in range(2)]
        first, second = (programs.enter_context(Replica(each)) for each in servers)
        first.update(trained)
        damage(trained)
        second.update(trained)
        expected = first.tokens()
        assert second.tokens() == expected
        first.release()
        first.update(trained)
        assert first.tokens() == expected
        for version in ("step-2", None):
            second.release()
            second.update(trained, version)
            assert second.tokens(version) != expected


def test_two_updates_at_once_share_a_load(replicas: Replicas, trained: Path) -> None:
    first, second = replicas.both_update(trained)
    replicas.held.unlink()
    first.result()
    second.result()
    assert replicas.first.tokens() == replicas.second.tokens()
    assert replicas.loads() == [replicas.first.server.process.pid]


def test_an_update_goes_on_if_the_replica_that_loads_is_killed(replicas: Replicas, trained: Path) -> None:
    _, second = replicas.both_update(trained)
    replicas.first.server.process.kill()
    wait_until(lambda: len(replicas.loads()) == 2)
    replicas.held.unlink()
    second.result()
    assert replicas.second.tokens()
    assert replicas.loads()[1] == replicas.second.server.process.pid


def test_an_update_that_fails_is_not_shared(replicas: Replicas, trained: Path) -> None:
    """Each replica finds by itself that the files are damaged, and has the weights that it had."""
    expected = [each.tokens(None) for each in (replicas.first, replicas.second)]
    (trained / "model.safetensors").write_bytes(b"cut off")
    for each in (replicas.first, replicas.second):
        each.release()
        with pytest.raises(InvalidRequestError, match="is damaged"):
            each.update(trained)
    assert [each.tokens(None) for each in (replicas.first, replicas.second)] == expected
    assert len(replicas.loads()) == 2


def test_all_ranks_load_if_the_store_lacks_the_part_of_one(trained: Path) -> None:
    """Then it has that part again."""
    store = f"test-{uuid.uuid4().hex[:12]}"
    changes = {"MEMSAVER_SHARED_BACKUPS": store, "MEMSAVER_HOST_BACKUP_LIMIT": "1GiB"}

    def parts() -> dict[int, str]:
        return {each["rank"]: each["id"] for each in listed(store) if each["model"] == str(trained)}

    with ExitStack() as programs:
        options = ("--tensor-parallel", "2")
        servers = [programs.enter_context(serving(*options, changes=changes, program=FORKED_RANKS)) for _ in range(2)]
        first, second = (programs.enter_context(Replica(each)) for each in servers)
        first.update(trained)
        assert memsaver("store", "drop", store, parts()[1]).returncode == 0
        assert set(parts()) == {0}
        second.update(trained)
        assert set(parts()) == {0, 1}
        assert first.tokens() == second.tokens()
        first.release()
        damage(trained)
        first.update(trained)
        assert first.tokens() == second.tokens()
