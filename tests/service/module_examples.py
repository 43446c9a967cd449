"""Examples of modules, each made releasable in at most five lines, and the checks that all of them pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memsaver_core as ms
from memsaver_server import Attachment, attach
from memsaver_server.client import Client
from memsaver_server.engine import AdmissionClosedError
from memsaver_server.integrations.module import ModuleEngine
from memsaver_server.integrations.module import engine as module_engine


@dataclass
class Example:
    """An attached module. ``run`` uses it as its program would; ``held`` is the memory that a release must free."""

    engine: ModuleEngine
    server: Attachment
    run: Callable[[], Tensor]
    held: list[Tensor]

    @property
    def bytes(self) -> int:
        """The size of the memory under ``held``; shared memory counts once."""
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in self.held}
        return sum(storages.values())


@contextmanager
def example(make: Callable[[int], Example], width: int) -> Iterator[Example]:
    """One of the examples below, ``width`` wide, while the block runs."""
    torch.manual_seed(11)
    with torch.inference_mode(False), torch.no_grad():
        made = make(width)
        try:
            yield made
        finally:
            ms.resume()
            made.server.close()
            made.engine.close()


def check_occupation(made: Example, slack_bytes: int) -> None:
    """Release and resume over HTTP, twice: measured, with the same addresses and the same outputs."""
    expected = made.run().cpu()
    assert expected.isfinite().all()
    assert expected.std() > 0
    where = [each.data_ptr() for each in made.held]
    with Client(made.server.url) as client:
        for _ in range(2):
            released = client.release()
            assert released.released_bytes >= made.bytes
            assert -sum(device.delta_bytes for device in released.devices) >= released.released_bytes - slack_bytes
            with pytest.raises(AdmissionClosedError, match="is released"):
                made.run()
            assert client.resume().resumed_bytes >= made.bytes
            assert [each.data_ptr() for each in made.held] == where
            assert torch.equal(made.run().cpu(), expected)


def tensors_of(*modules: nn.Module) -> list[Tensor]:
    return [each.tensor for each in module_engine.tensors_of(modules)]


# A denoising loop: many calls are one request, and a buffer is scratch memory.


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.time = nn.Linear(1, 2 * width)
        self.middle = nn.Sequential(nn.GroupNorm(4, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 2 * width, 1))
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.out = nn.Conv2d(2 * width, 4, 3, padding=1)
        self.register_buffer("scratch", torch.empty(1, 2 * width, 32, 32), persistent=False)

    def forward(self, latents: Tensor, time: float) -> Tensor:
        skip = self.into(latents)
        deep = self.down(skip) + self.time(latents.new_full((1, 1), time))[..., None, None]
        return self.out(torch.cat([skip, self.up(deep + self.middle(deep))], dim=1, out=self.scratch))


def denoiser(width: int) -> Example:
    unet = UNet(width).to(ms.torch_device()).eval()
    noise = torch.randn(1, 4, 32, 32, device=ms.torch_device())

    engine = ModuleEngine(unet, workspaces="*scratch")
    server = attach(engine)

    def run() -> Tensor:
        latents = noise
        with engine.request():
            for step in range(4):
                latents = latents - 0.2 * unet(latents, 1 - step / 4)
        return latents

    return Example(engine, server, run, tensors_of(unet))


# An embedding model: one call is one request.


class TextEncoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(500, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("positions", torch.randn(64, width), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.layers(self.tokens(ids) + self.positions[: ids.shape[1]])
        return functional.normalize(hidden.mean(dim=1), dim=-1)


def embedder(width: int) -> Example:
    model = TextEncoder(width).to(ms.torch_device()).eval()
    ids = torch.randint(500, (3, 17), device=ms.torch_device())

    engine = ModuleEngine(model)
    server = attach(engine)

    return Example(engine, server, lambda: model(ids), tensors_of(model))


# A mixture of experts: the first call allocates a workspace for the module, and one for its class.


class Experts(nn.Module):
    shared: Tensor | None = None

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)
        self.workspace: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        experts, width, inner = self.up.shape
        if self.workspace is None:
            self.workspace = tokens.new_empty(experts, 64, inner)
        if Experts.shared is None:
            Experts.shared = tokens.new_empty(experts, 64, width)
        hidden = torch.matmul(tokens, self.up, out=self.workspace[:, : len(tokens)]).relu_()
        each = torch.matmul(hidden, self.down, out=Experts.shared[:, : len(tokens)])
        return torch.einsum("te,etd->td", self.router(tokens).softmax(-1), each)


def mixture(width: int) -> Example:
    Experts.shared = None
    model = Experts(width).to(ms.torch_device()).eval()
    tokens = torch.randn(64, width, device=ms.torch_device())

    engine = ModuleEngine(model)
    with engine.workspace(restore="zero"):
        model(tokens)
    server = attach(engine)

    assert model.workspace is not None
    assert Experts.shared is not None
    return Example(engine, server, lambda: model(tokens), [*tensors_of(model), model.workspace, Experts.shared])


# Tied weights: the input's embedding is the output's matrix, under three names.


class TiedModel(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(500, width)
        self.block = nn.Linear(width, width)
        self.head = nn.Linear(width, 500, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("first_rows", self.embed.weight.detach()[:10], persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embed(ids)).tanh() + self.first_rows.mean(dim=0))


def tied(width: int) -> Example:
    model = TiedModel(width)
    model = model.to(ms.torch_device()).eval()
    model.first_rows = model.embed.weight.detach()[:10]  # to() copies what a view shares
    ids = torch.arange(20, device=ms.torch_device())

    engine = ModuleEngine(model)
    server = attach(engine)

    return Example(engine, server, lambda: model(ids), tensors_of(model))


# A vision encoder whose call is one captured graph.


class VisionEncoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, stride=16)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(self.patches(images).flatten(2).transpose(1, 2)).mean(dim=1)


def vision(width: int) -> Example:
    model = VisionEncoder(width).to(ms.torch_device()).eval()
    images = torch.randn(2, 3, 64, 64, device=ms.torch_device())

    engine = ModuleEngine(model)
    graph = torch.cuda.CUDAGraph()
    with engine.workspace(restore="zero"):
        static_images = images.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(static_images)  # one-time allocations must not happen in the capture
    torch.cuda.current_stream().wait_stream(stream)
    with ms.graph(graph, stream=stream):
        features = model(static_images)
    server = attach(engine)

    def run() -> Tensor:
        with engine.request():
            static_images.copy_(images)
            graph.replay()
            return features.clone()  # a release takes the graph's memory

    return Example(engine, server, run, [*tensors_of(model), static_images, features])
