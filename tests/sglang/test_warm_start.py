"""SGLang's load format ``memsaver``."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from uuid import uuid4

from tests.reliability.test_keeper import Keeper

from . import checkpoint
from .conftest import Start

OPTIONS = ("--load-format", "memsaver", "--enable-weights-cpu-backup")


def test_a_server_takes_its_weights_from_the_store(start: Start) -> None:
    """It computes the same, releases and resumes, and updates write in place."""
    store = f"test-{uuid4().hex[:12]}"
    keeper = Keeper(store)
    first = start(*OPTIONS, MEMSAVER_SHARED_BACKUPS=store)
    assert "loaded in the ordinary way: the store has none of this model" in first.output()
    second = start(*OPTIONS, MEMSAVER_SHARED_BACKUPS=store)
    assert "came from the shared store" in second.output(), second.output()[-5000:]
    expected = first.generate()
    first.close()
    keeper.end(signal.SIGTERM)
    assert second.generate() == expected
    second.check_cycles(second.generate)
    second.write_weights()
    second.check_cycles(second.generate)
    assert second.generate() == expected


def test_two_servers_that_start_at_once_share_a_load(start: Start) -> None:
    """Without a keeper: what SGLang replaces after it has loaded the weights is not in the store."""
    store = f"test-{uuid4().hex[:12]}"
    servers = [start(*OPTIONS, wait=False, MEMSAVER_SHARED_BACKUPS=store) for _ in range(2)]
    for each in servers:
        each.wait_until_up()
    loaded = ["loaded in the ordinary way" in each.output() for each in servers]
    assert sorted(loaded) == [False, True]
    assert ["came from the shared store" in each.output() for each in servers] == [not each for each in loaded]
    assert servers[0].generate() == servers[1].generate()


def test_an_update_while_released_is_loaded_once(start: Start, tmp_path: Path) -> None:
    """The second server does not see that the file has other weights by then, because it does not read it."""
    store = f"test-{uuid4().hex[:12]}"
    servers = [start(*OPTIONS, MEMSAVER_SHARED_BACKUPS=store) for _ in range(2)]
    model = checkpoint.write(tmp_path / "model", seed=8)
    file, other = model / "model.safetensors", checkpoint.write(tmp_path / "other", seed=9) / "model.safetensors"
    tokens = []
    for server in servers:
        server.own("/release_memory_occupation")
        server.write_weights(model_path=str(model), weight_version="step-1")
        server.service("/resume_memory_occupation", {"weights_version": "step-1"})
        tokens.append(server.generate())
        times = file.stat().st_atime_ns, file.stat().st_mtime_ns
        file.write_bytes(other.read_bytes())
        os.utime(file, ns=times)
    assert tokens[0] == tokens[1]
    servers[1].write_weights(model_path=str(model))
    assert servers[1].generate() != tokens[1]
    servers[1].check_cycles(servers[1].generate)


def test_without_backups_weights_are_not_shared(start: Start) -> None:
    server = start(*OPTIONS[:2], MEMSAVER_SHARED_BACKUPS=f"test-{uuid4().hex[:12]}")
    assert "start with --enable-memory-saver and --enable-weights-cpu-backup, too" in server.output()
    assert server.generate()
