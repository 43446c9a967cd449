"""Calls as engines and trainers make them of torch_memory_saver, on the host driver.

The functions, arguments and order are those of ``TorchMemorySaverAdapter`` in SGLang (commit 1373e4f547e8) and in
tokenspeed (commit 0667f01e6968), and of the train actors of slime and miles. Captures: tests/gpu/test_compat_gpu.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch

import memsaver_core as ms
from memsaver_core import process
from memsaver_core.compat import install

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host driver's regions")


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """``torch_memory_saver`` as an engine imports it."""
    before = {name for name in sys.modules if name.split(".")[0] == "torch_memory_saver"}
    install()
    import torch_memory_saver  # type: ignore[import-not-found]

    yield torch_memory_saver
    for name in [name for name in sys.modules if name.split(".")[0] == "torch_memory_saver" and name not in before]:
        del sys.modules[name]


class SglangAdapter:
    """Holds the module's own object."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._memory_saver = module.torch_memory_saver

    @property
    def enabled(self) -> bool:
        return self._memory_saver is not None and self._memory_saver.enabled

    def configure_subprocess(self) -> AbstractContextManager[None]:
        return self._module.configure_subprocess()

    def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager[None]:
        return self._memory_saver.region(tag=tag, enable_cpu_backup=enable_cpu_backup)

    def cuda_graph(self, **kwargs: Any) -> AbstractContextManager[None]:
        return self._memory_saver.cuda_graph(**kwargs)

    def disable(self) -> AbstractContextManager[None]:
        return self._memory_saver.disable()

    def pause(self, tag: str | None) -> None:
        return self._memory_saver.pause(tag=tag)

    def resume(self, tag: str | None) -> None:
        return self._memory_saver.resume(tag=tag)


class TokenspeedAdapter:
    """Makes its own object. A tag may be missing; graphs stay, and nothing is disabled."""

    enabled = True

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._memory_saver = module.TorchMemorySaver()

    def configure_subprocess(self) -> AbstractContextManager[None]:
        return self._module.configure_subprocess()

    def region(self, tag: str | None = None, enable_cpu_backup: bool = False) -> AbstractContextManager[None]:
        return self._memory_saver.region(tag=tag or "default", enable_cpu_backup=enable_cpu_backup)

    def pause(self, tag: str | None = None) -> None:
        return self._memory_saver.pause(tag=tag)

    def resume(self, tag: str | None = None) -> None:
        return self._memory_saver.resume(tag=tag)


Adapter = SglangAdapter | TokenspeedAdapter
each_adapter = pytest.mark.parametrize("adapt", [SglangAdapter, TokenspeedAdapter])


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(64, 64)
        self.register_buffer("scale", torch.full((64,), 2.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.projection(inputs) * self.scale


class Scheduler:
    """Weights without a backup, their buffers saved by the engine itself, and a KV cache."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        with adapter.region("weights", enable_cpu_backup=False):
            self.model = Model()
        with adapter.region("kv_cache"):
            self.cache = torch.ones(2, 16, 64)

    def release_memory_occupation(self, tags: list[str]) -> None:
        if "kv_cache" in tags:
            self.adapter.pause("kv_cache")
        if "weights" in tags:
            self._stashed = [(name, buffer.detach().clone()) for name, buffer in self.model.named_buffers()]
            self.adapter.pause("weights")
        if "cuda_graph" in tags:
            self.adapter.pause("cuda_graph")  # nothing was captured: ignored

    def resume_memory_occupation(self, tags: list[str]) -> None:
        if "cuda_graph" in tags:
            self.adapter.resume("cuda_graph")
        if "weights" in tags:
            self.adapter.resume("weights")
            buffers = dict(self.model.named_buffers())
            for name, stashed in self._stashed:
                buffers[name][...] = stashed
        if "kv_cache" in tags:
            self.adapter.resume("kv_cache")


@each_adapter
@pytest.mark.guards("undefined KV cache pages produced NaN")
def test_scheduler_of_an_engine(module: ModuleType, adapt: Callable[[ModuleType], Adapter]) -> None:
    """A rollout engine between two steps: everything is paused, the weights return and are overwritten, then the
    cache returns as zeros."""
    adapter = adapt(module)
    assert adapter.enabled
    with adapter.configure_subprocess():
        pass  # an engine starts its scheduler here
    scheduler = Scheduler(adapter)
    inputs = torch.randn(3, 64)
    expected = scheduler.model(inputs)
    weights = {name: value.detach().clone() for name, value in scheduler.model.named_parameters()}
    for _ in range(2):
        everything = ["kv_cache", "weights", "cuda_graph"]
        scheduler.release_memory_occupation(everything)
        states = {each.tag: each.state for each in ms.status().tags}
        assert (states["weights"], states["kv_cache"]) == ("released", "released")
        scheduler.resume_memory_occupation(["weights"])
        with torch.no_grad():
            for name, value in scheduler.model.named_parameters():
                value.copy_(weights[name])
        scheduler.resume_memory_occupation(["kv_cache", "cuda_graph"])
        assert torch.equal(scheduler.model(inputs), expected)
        assert not scheduler.cache.any()
        scheduler.cache.fill_(1)


@each_adapter
def test_weights_with_a_backup(module: ModuleType, adapt: Callable[[ModuleType], Adapter]) -> None:
    adapter = adapt(module)
    with adapter.region("weights", enable_cpu_backup=True):
        model = Model()
    inputs = torch.randn(3, 64)
    expected = model(inputs)
    adapter.pause("weights")
    adapter.resume("weights")
    assert torch.equal(model(inputs), expected)
    adapter.pause(None)
    adapter.resume(None)
    assert torch.equal(model(inputs), expected)


def test_tag_that_an_adapter_leaves_out(module: ModuleType) -> None:
    adapter = TokenspeedAdapter(module)
    with adapter.region(enable_cpu_backup=True):
        tensor = torch.ones(10)
    adapter.pause("default")
    assert [tag.state for tag in ms.status().tags if tag.tag == "default"] == ["released"]
    adapter.resume("default")
    assert float(tensor.sum()) == 10


def test_memory_that_an_adapter_leaves_out(module: ModuleType) -> None:
    adapter = SglangAdapter(module)
    with adapter.region("weights"):
        with adapter.disable():
            ordinary = torch.ones(10)
        weights = torch.ones(10)
    owned = [process.saver().owns(each.data_ptr()) for each in (ordinary, weights)]
    assert owned == [False, True]


def test_mode_that_others_chose_first(module: ModuleType) -> None:
    """A trainer sets one mode at import, and the engine in the same process sets another one before the first use."""
    saver = module.TorchMemorySaver()
    saver.hook_mode = "torch"
    saver.hook_mode = "preload"
    with saver.region("weights"):
        assert process.saver().owns(torch.ones(10).data_ptr())


def test_train_actor(module: ModuleType) -> None:
    """A trainer pauses for the rollout; its weights are sent from their backup meanwhile."""
    saver = module.torch_memory_saver
    margin = 1 << 20
    saver.memory_margin_bytes = margin
    try:
        with saver.region("default", enable_cpu_backup=True):
            model = Model()
            with saver.region("gradients", enable_cpu_backup=False):
                gradients = torch.zeros(1000)
            saver.pause()
            with saver.disable() if saver.enabled else nullcontext():
                sent = {
                    name: value if (backup := saver.get_cpu_backup(value, zero_copy=True)) is None else backup
                    for name, value in model.named_parameters()
                }
                flat = torch.cat([each.detach().flatten() for each in sent.values()])
            assert not process.saver().owns(flat.data_ptr())
        saver.resume()
        assert torch.equal(flat, torch.cat([each.detach().flatten() for each in model.parameters()]))
        gradients.zero_()
        assert saver.get_cpu_backup(model.projection.weight) is None
    finally:
        saver.memory_margin_bytes = 0


def test_library_that_must_have_ordinary_memory(module: ModuleType) -> None:
    """A communication buffer is allocated between two calls of the private setter, with or without saving its value."""
    saver = module.torch_memory_saver
    saver._ensure_initialized()
    assert saver._impl is not None
    cdll = saver._impl._binary_wrapper.cdll
    with saver.region("default", enable_cpu_backup=True):
        prior = cdll.tms_get_interesting_region()
        cdll.tms_set_interesting_region(False)
        buffer = torch.zeros(100)
        cdll.tms_set_interesting_region(prior)
        weights = torch.zeros(100)
    assert not process.saver().owns(buffer.data_ptr())
    assert process.saver().owns(weights.data_ptr())


def test_regions_of_several_threads(module: ModuleType) -> None:
    """A region applies to its own thread only."""
    adapter = SglangAdapter(module)
    made: dict[str, torch.Tensor] = {}
    ready = threading.Barrier(2)

    def build(tag: str, backup: bool) -> None:
        with adapter.region(tag, enable_cpu_backup=backup):
            ready.wait(600)
            made[tag] = torch.full((1000,), 5.0)
            ready.wait(600)

    threads = [threading.Thread(target=build, args=args) for args in (("thread-a", True), ("thread-b", False))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    adapter.pause("thread-a")
    assert float(made["thread-b"].sum()) == 5000
    adapter.resume("thread-a")
    assert float(made["thread-a"].sum()) == 5000
