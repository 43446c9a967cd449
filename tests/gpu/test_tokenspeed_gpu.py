"""Real tokenspeed with its real kernels on a GPU, by its gRPC server: the gateway fetches an encoding."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from memsaver_core import compat
from tests.engine_server import EngineServer, free_port, prompts
from tests.gpu import engines
from tests.sglang import checkpoint

if missing := engines.missing("tokenspeed", "tokenspeed", "tokenspeed.plugins"):
    pytest.skip(missing, allow_module_level=True)
if find_spec("tokenspeed_kernel") is None:
    pytest.skip("tokenspeed's kernels are not installed", allow_module_level=True)

import grpc

from tests.tokenspeed.server import ARGUMENTS, NO_PREFIXES, Server, write_model

CONFIG = json.loads((Path(__file__).parents[1] / "data" / "qwen2-1.5b" / "config.json").read_text())
#: Prompts of more than 64 tokens are computed without a graph. The KVStore would pin 120 GB at the start.
QUICK = (
    "--chunked-prefill-size", "512", "--gpu-memory-utilization", "0.5", "--max-cudagraph-capture-size", "8",
    "--prefill-graph-max-tokens", "64", NO_PREFIXES, "--kvstore-size", "4",
)  # fmt: skip
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join([str(compat.PATH), os.environ.get("PYTHONPATH", "")]),
    "TOKENSPEED_KERNEL_OVERRIDE_EMBEDDING_ROPE": "triton",  # the one in CUDA is for Blackwell alone
    "TRANSFORMERS_OFFLINE": "1",
}
MIB = 1 << 20

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


class GpuServer(Server):
    def __init__(self, model: Path, log: Path, *arguments: str) -> None:
        EngineServer.__init__(self, log)
        grpc_port = free_port()
        self._address = f"127.0.0.1:{grpc_port}"
        command = [sys.executable, "-m", "smg_grpc_servicer.tokenspeed", "--model", str(model)]
        ports = ["--port", str(grpc_port), "--rl-control-port", self.url.rpartition(":")[2]]
        self.run(
            [*command, *ARGUMENTS, *QUICK, *ports, *arguments],
            {**ENVIRONMENT, "MEMSAVER_TOKENSPEED": self.service_url.removeprefix("http://")},
        )

    def answers(self) -> list[list[int]]:
        """The longer prompt is computed in two parts, the second with the cache of the first."""
        return [self.generate(24, [(7919 * (each + 3)) % 1000 + 10 for each in range(length)]) for length in (7, 900)]

    def tagged(self) -> int:
        return sum(each["bytes"] for each in self.get("/memory_occupation").json()["tags"])


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(write_model(tmp_path_factory.mktemp("model")), config=CONFIG)


@pytest.fixture(scope="module", params=["triton", "fa3"])
def served(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GpuServer]:
    """With an attention backend; ``fa3`` is what tokenspeed chooses on Hopper."""
    started = GpuServer(model, tmp_path_factory.mktemp("server") / "log", "--attention-backend", request.param)
    try:
        started.wait_until_up()
        yield started
    finally:
        started.close()


@pytest.fixture
def server(served: GpuServer) -> Iterator[GpuServer]:
    yield served
    assert not served.is_dead(), served.output()[-3000:]
    served.service("/resume_memory_occupation")


@pytest.mark.parametrize("caller", ["own", "service"])
def test_cycles(server: GpuServer, caller: str) -> None:
    call, expected = getattr(server, caller), server.answers()
    assert len({token for answer in expected for token in answer}) > 10
    for _ in range(3):
        loaded = used()
        call("/release_memory_occupation")
        assert set(server.tags().values()) == {"released"}
        assert loaded - used() >= server.tagged() - 64 * MIB
        call("/resume_memory_occupation")
        assert server.answers() == expected, server.output()[-3000:]


def test_hibernation(server: GpuServer) -> None:
    expected = server.answers()
    server.service("/release_memory_occupation")
    released = used()
    server.service("/resume_memory_occupation")
    server.service("/release_memory_occupation", {"hibernate": True})
    assert used() < released
    server.own("/resume_memory_occupation")
    assert server.answers() == expected


def test_a_request_in_flight(server: GpuServer) -> None:
    (prompt,) = prompts(1)
    expected = server.generate(400, prompt)
    (running,) = server.in_background(1, 400)
    server.service("/release_memory_occupation", {"timeout_s": 60})
    assert running.result(60) == expected
    with pytest.raises(grpc.RpcError, match="is released"):
        server.generate()
    server.service("/resume_memory_occupation")
    assert server.generate(400, prompt) == expected
