"""vLLM's load format ``memsaver``, behind vLLM's interfaces."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from memsaver_core.compat import loading
from tests.programs import Child

ROOT = Path(__file__).parents[2]
PATHS = [str(ROOT / "tests" / "data" / "vllm_standin"), str(ROOT), str(ROOT / "server")]

WORKER = """
import json, logging, sys
from types import SimpleNamespace as Config

import memsaver_core as ms
from memsaver_core.compat.vllm.plugin import register

logging.basicConfig(stream=sys.stderr)
register()
from vllm.model_executor import model_loader
from vllm.v1.worker.gpu_worker import Worker

folder, asked = sys.argv[1], json.loads(sys.argv[2])
parallel = dict(rank=0, world_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=2)
parallel |= dict(data_parallel_rank=0, enable_expert_parallel=False) | asked.get("parallel", {})
model = dict(model=folder, revision=None, dtype="bfloat16", quantization=None, sleep_mode_backend="memsaver")
model_config = Config(**model | dict(enable_sleep_mode=True) | asked.get("model", {}))
load_config = Config(load_format="memsaver", download_dir=None)
config = Config(model_config=model_config, parallel_config=Config(**parallel), load_config=load_config)
worker = Worker(config)
worker.init_device()
loader = model_loader.get_model_loader(load_config)
with worker._maybe_get_memory_pool_context("weights"):
    made = loader.load_model(vllm_config=config, model_config=model_config)
for line in sys.stdin:
    if line.strip() == "reload":
        before = made.weight.data_ptr()
        loader.load_weights(made, model_config)
        assert made.weight.data_ptr() == before
    print(json.dumps([loader.read, float(made.weight.sum()), float(made.packed.sum()), float(made.scale.sum())]),
          flush=True)
"""


class Worker(Child):
    def __init__(self, folder: Path, store: str, **asked: Any) -> None:
        settings = {"MEMSAVER_DRIVER": "host", "MEMSAVER_SHARED_BACKUPS": store, "MEMSAVER_VLLM": ""}
        path = os.pathsep.join(PATHS)
        super().__init__("-c", WORKER, str(folder), json.dumps(asked), PYTHONPATH=path, **settings)

    def does(self, what: str = "") -> list[float]:
        answer: list[float] = json.loads(self.ask(what))
        return answer


@pytest.fixture
def store() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({"weight": torch.arange(200_000.0).view(400, 500)}, tmp_path / "model.safetensors")
    return tmp_path


def test_what_a_model_makes_itself_is_not_shared() -> None:
    """Other buffers are, also those that no checkpoint has: some loaders fill them."""
    model = torch.nn.Module()
    model.rotary = torch.nn.Module()
    model.rotary.register_buffer("cos_sin_cache", torch.zeros(3), persistent=False)
    model.rotary.register_buffer("limit", torch.zeros(3), persistent=False)
    model.weight = torch.nn.Parameter(torch.zeros(3))
    assert set(loading.tensors_of(model)) == {"weight", "rotary.limit"}


def test_a_worker_starts_from_the_store(checkpoint: Path, store: str) -> None:
    """What vLLM makes of the weights afterwards is made anew; a reload writes in place, and reads the checkpoint."""
    with Worker(checkpoint, store) as first:
        read, *sums = first.does()
        assert read == 1
        with Worker(checkpoint, store) as second:
            assert second.does() == [0, *sums]
            assert second.does("reload") == [1, *sums]
        # Another replica of an engine without experts has the same weights.
        with Worker(checkpoint, store, parallel={"data_parallel_rank": 1}) as replica:
            assert replica.does() == [0, *sums]


@pytest.mark.parametrize(
    "asked",
    [
        {"model": {"dtype": "float16"}},
        {"model": {"quantization": "fp8"}},
        {"model": {"enable_sleep_mode": False}},
        {"parallel": {"tensor_parallel_size": 2, "world_size": 2}},
        {"parallel": {"enable_expert_parallel": True, "data_parallel_rank": 1}},
    ],
)
def test_other_weights_are_read(checkpoint: Path, store: str, asked: dict[str, Any]) -> None:
    with Worker(checkpoint, store) as first:
        assert first.does()[0] == 1
        with Worker(checkpoint, store, **asked) as other:
            assert other.does() == first.does()


def test_a_changed_checkpoint_is_read(checkpoint: Path, store: str) -> None:
    with Worker(checkpoint, store) as first:
        _, *sums = first.does()
        save_file({"weight": torch.ones(400, 500)}, checkpoint / "model.safetensors")
        with Worker(checkpoint, store) as other:
            read, *others = other.does()
        assert read == 1
        assert others != sums
