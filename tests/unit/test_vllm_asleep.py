"""vLLM's updates of weights that are released, on a worker of one model. The real ones run in tests/gpu."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memsaver_core as ms
from memsaver_core.compat.vllm import asleep
from memsaver_core.contract.errors import UnsupportedError


class Worker:
    """With what memsaver adds to vLLM's."""

    memsaver_call, memsaver_write, memsaver_end_write = asleep.METHODS.values()

    def __init__(self, model: torch.nn.Module) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(quantization=None), parallel_config=SimpleNamespace()
        )
        self.model_runner = SimpleNamespace(get_model=lambda: model)

    def load_weights(self, value: float) -> None:
        for each in self.model_runner.get_model().parameters():
            each.data.fill_(value)

    def make_weights_anew(self, value: float) -> None:
        self.model_runner.get_model().weight = torch.nn.Parameter(torch.full((400, 500), value))

    def keep_weights_beside(self, value: float) -> None:
        self.model_runner.get_model().more = torch.full((3,), value)


@pytest.fixture
def tag() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def model(tag: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.nn.Linear]:
    monkeypatch.setattr(asleep, "WEIGHTS", tag)
    with ms.region(tag, restore="host"):
        model = torch.nn.Linear(500, 400)
    model.scale = torch.ones(3)  # in host memory before any update
    model.requires_grad_(False)
    yield model
    ms.resume([tag])


def update(worker: Worker, method: str, value: float) -> None:
    """As ``collective_rpc`` of an engine core with this worker."""

    def call(_core: Any, method: str, _timeout: Any, args: Any, kwargs: Any = None) -> list[Any]:
        return [getattr(worker, method)(*args, **(kwargs or {}))]

    assert asleep.weights_are_released()
    core = SimpleNamespace(model_executor=SimpleNamespace(sleeping_tags={asleep.WEIGHTS}))
    asleep.write(call, core, method, None, (value,))


def test_a_wake_up_brings_in_what_was_written(model: torch.nn.Linear, tag: str) -> None:
    worker, address = Worker(model), model.weight.data_ptr()
    for value in (2.0, 3.0):
        ms.release([tag])
        update(worker, "load_weights", value)
        ms.resume([tag])
        assert bool((model.weight == value).all())
        assert model.weight.data_ptr() == address


@pytest.mark.parametrize(("method", "named"), [("make_weights_anew", "weight"), ("keep_weights_beside", "Linear.more")])
def test_a_loader_that_makes_tensors_anew_is_refused(model: torch.nn.Linear, tag: str, method: str, named: str) -> None:
    before = model.weight.clone()
    ms.release([tag])
    with pytest.raises(UnsupportedError, match=f"made tensors anew \\({named}\\)"):
        update(Worker(model), method, 2.0)
    ms.resume([tag])
    assert torch.equal(model.weight, before)
