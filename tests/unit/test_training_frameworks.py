"""Trainers of real Megatron-core and DeepSpeed, two ranks on the CPU: losses are those of a run without releases, and
what is discarded is kept nowhere. Skipped unless these packages are installed, which no requirement of the tests names.
"""

from __future__ import annotations

import importlib.util
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.programs import Child
from tests.unit.framework_trainer import RANKS, TRAINERS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on the CPU, with gloo")


@pytest.mark.parametrize("kind", TRAINERS)
def test_losses_are_those_of_a_run_without_releases(kind: str, tmp_path: Path) -> None:
    package = kind.split(",")[0]
    if importlib.util.find_spec(package) is None:  # to import DeepSpeed changes torch
        pytest.skip(f"needs {package}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])

    def tags(rank: int) -> dict[str, list[int]]:
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "DS_ACCELERATOR": "cpu"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        settings = {"MEMSAVER_DRIVER": "host", "OMP_NUM_THREADS": "1"}
        command = ("-m", "tests.unit.framework_trainer", kind, str(rank), str(tmp_path))
        with Child(*command, by_itself=True, **place, **address, **settings) as trainer:
            lines = trainer.process.communicate(timeout=800)[0].splitlines()
        found: dict[str, list[int]] = json.loads(lines[-1])
        return found

    with ThreadPoolExecutor(RANKS) as pool:
        for each in pool.map(tags, range(RANKS)):
            kept = {name for name, (released, copied) in each.items() if released and copied > 0.9 * released}
            gone = {name for name, (released, copied) in each.items() if released and not copied}
            assert kept | gone == set(each)
            discards = kind not in ("deepspeed, ZeRO 0", "deepspeed, ZeRO 3")
            assert kept == ({"optimizer"} if discards else {"model", "optimizer"})
            assert gone == ({"copies"} if discards else set()) | ({"gradients"} if package == "megatron" else set())
