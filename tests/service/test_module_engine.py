"""Attached torch modules of several kinds, and the effect of released memory on their calls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from torch import nn

from memsaver_server import Settings, attach
from memsaver_server.client import Client, DrainDeadlineError
from memsaver_server.engine import AdmissionClosedError
from memsaver_server.integrations.module import ModuleEngine
from tests.waiting import wait_until

from . import module_examples
from .module_examples import example


def test_what_the_first_call_makes_is_a_workspace() -> None:
    with example(module_examples.mixture, 64) as made, Client(made.server.url) as client:
        *_, own, shared = made.held
        made.run()
        assert own.any()
        assert shared.any()
        assert client.release(["workspace"]).released_bytes >= own.nbytes + shared.nbytes
        client.resume()
        assert not own.any()
        assert not shared.any()


def test_a_program_writes_released_weights() -> None:
    """Tied ones, and a view of them that is in no state dict."""
    with example(module_examples.tied, 64) as made, Client(made.server.url) as client:
        embedding = made.held[0]
        saved = embedding + 1
        before = made.run()
        client.release()
        with made.server.lifecycle.writing(version="new"):
            embedding.copy_(saved)
        client.resume(weights_version="new")
        assert torch.equal(embedding, saved)
        after = made.run()
        assert not torch.equal(after, before)
        embedding.copy_(saved)
        assert torch.equal(made.run(), after)


class Blocking(nn.Module):
    """Its calls stay inside until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4096.0))
        self.entered = Event()
        self.go_on = Event()

    def forward(self) -> torch.Tensor:
        self.entered.set()
        assert self.go_on.wait(600)
        return self.weight.sum()


@pytest.mark.guards("memory was unmapped while kernels still used it")
def test_a_release_waits_for_calls_in_flight() -> None:
    """Nothing is unmapped during a forward; one that runs too long is named."""
    model = Blocking()
    engine = ModuleEngine(model)
    with ThreadPoolExecutor() as threads, attach(engine) as server, Client(server.url) as client:
        try:
            call = threads.submit(model)
            assert model.entered.wait(600)
            with pytest.raises(DrainDeadlineError, match="Blocking"):
                client.release(timeout_s=0.0)
            release = threads.submit(client.release, timeout_s=60.0)
            model.go_on.set()
            assert call.result(600) == 4096 * 4095 / 2
            assert release.result(600).released_bytes >= model.weight.nbytes
            client.resume()
            assert model() == call.result()
        finally:
            model.go_on.set()
    engine.close()


@pytest.mark.guards("a request during sleep hung or used released memory")
def test_calls_are_held_where_the_service_is_set_up_so() -> None:
    """A call during a release waits for the resume, and computes with the restored weights."""
    model = nn.Linear(64, 64)
    engine = ModuleEngine(model)
    inputs = torch.randn(2, 64)
    expected = model(inputs)
    settings = Settings(while_released="queue", queue_limit=8)
    with ThreadPoolExecutor() as threads, attach(engine, settings=settings) as server, Client(server.url) as client:
        client.release()
        calls = [threads.submit(model, inputs) for _ in range(3)]

        def all_are_held() -> bool:
            assert not any(call.done() for call in calls)
            return engine.held == 3

        wait_until(all_are_held)
        client.resume()
        assert all(torch.equal(call.result(600), expected) for call in calls)
    engine.close()


def test_weights_that_are_given_up_come_back_by_a_state_dict_and_the_rest_by_itself() -> None:
    """As vLLM's level 2: buffers that are in no state dict are kept."""
    model = nn.BatchNorm1d(64).eval()
    model.register_buffer("table", torch.randn(64), persistent=False)
    model.offsets = [torch.randn(64)]
    assert model.running_mean is not None
    model.running_mean.normal_()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = torch.randn(3, 64)
    expected = model(inputs) + model.table + model.offsets[0]
    engine = ModuleEngine(model)
    with attach(engine) as server, Client(server.url) as client:
        client.release(restore={"weights": "discard"})
        client.resume()
        with pytest.raises(AdmissionClosedError, match="content of weights"):
            model(inputs)
        with server.lifecycle.writing():
            model.load_state_dict(saved)
        assert torch.equal(model(inputs) + model.table + model.offsets[0], expected)
    engine.close()
