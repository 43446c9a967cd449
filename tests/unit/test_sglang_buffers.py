"""What SGLang allocates outside of its regions gets a tag as it starts: by the hooks, without SGLang."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import memsaver_core as ms
from memsaver_core import process
from memsaver_server.integrations.sglang import buffers

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on the host driver")


class Backend:
    """``AttentionBackend`` of SGLang."""


class Paged(Backend):
    def __init__(self, allocate: Callable[[], torch.Tensor]) -> None:
        self.allocate, self.metadata = allocate, allocate()

    def init_cuda_graph_state(self, rows: int) -> None:
        self.graphs = [self.allocate() for _ in range(rows)]


class MultiStep:
    """The backend of a draft model, which derives from no class of SGLang."""

    def __init__(self, allocate: Callable[[], torch.Tensor]) -> None:
        self.allocate = allocate

    def init_cuda_graph_state(self, rows: int) -> None:
        self.graphs = [self.allocate() for _ in range(rows)]


@pytest.fixture(autouse=True)
def _resumed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    base, drafts = ModuleType(buffers.ATTENTION), ModuleType(buffers.ATTENTION.replace("base", "draft"))
    base.AttentionBackend, drafts.MultiStep = Backend, MultiStep  # type: ignore[attr-defined]
    for module in (base, drafts):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for backend in (Paged, MultiStep):
        monkeypatch.setattr(backend, "init_cuda_graph_state", backend.init_cuda_graph_state)
    yield
    ms.resume()


def hook(name: str) -> Callable[..., Any]:
    return next(each for target, each in buffers.hooks().items() if target.endswith("." + name))


def start(enabled: bool) -> dict[str, torch.Tensor]:
    """Return what a scheduler allocates as it starts, and the workspace that it makes later."""
    made: dict[str, torch.Tensor] = {}

    def allocate() -> torch.Tensor:
        return torch.full((4096,), 7.0)

    def get_buffer(context: None, name: str, factory: Callable[[], torch.Tensor]) -> torch.Tensor:
        return made.setdefault(name, factory())

    def attend(scheduler: Any) -> None:
        scheduler.backend, scheduler.draft = Paged(allocate), MultiStep(allocate)
        for name in ("flashinfer_workspace", "scale"):
            hook("get_buffer")(get_buffer, None, name, allocate)

    def initialize(scheduler: Any) -> None:
        made["adapters"] = hook("init_lora_manager")(allocate)
        hook("init_all_attention_backends")(attend, scheduler)
        for backend in (scheduler.backend, scheduler.draft):
            backend.init_cuda_graph_state(2)
        made["untouched"] = allocate()

    scheduler = SimpleNamespace(server_args=SimpleNamespace(enable_memory_saver=enabled))
    hook("init_model_worker")(initialize, scheduler)
    hook("get_buffer")(get_buffer, None, "late_workspace", allocate)
    made |= {"metadata": scheduler.backend.metadata, "graphs": scheduler.backend.graphs[1]}
    made["draft"] = scheduler.draft.graphs[1]
    return made


def test_buffers_have_tags() -> None:
    made = start(enabled=True)
    owned = {name for name, tensor in made.items() if process.saver().owns(tensor.data_ptr())}
    assert owned == {"adapters", "flashinfer_workspace", "scale", "metadata", "graphs", "draft"}
    ms.release(["runtime", "workspace"])
    ms.resume()
    zeros = {name for name, tensor in made.items() if not tensor.any()}
    assert zeros == {"flashinfer_workspace"}
    assert all(bool((tensor == 7).all()) for name, tensor in made.items() if name not in zeros)


def test_nothing_changes_without_a_memory_saver() -> None:
    assert not any(process.saver().owns(tensor.data_ptr()) for tensor in start(enabled=False).values())
