from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

_LOADERS: dict[str, Any] = {}


class Weight(torch.nn.Parameter):
    """vLLM's parameters are of classes of its own."""


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Weight(torch.empty(400, 500), requires_grad=False)
        self.register_buffer("scale", torch.full((5,), 2.5))
        self.packed: torch.Tensor | None = None


class DefaultModelLoader:
    def __init__(self, load_config: Any) -> None:
        if load_config.load_format != "auto":
            raise ValueError(f"Unknown load_format: {load_config.load_format}")
        self.load_config = load_config
        self.read = 0

    def download_model(self, model_config: Any) -> None:
        raise AssertionError("the model is a folder")

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Model:
        model = Model()
        self.load_weights(model, model_config)
        model.packed = model.weight.t().clone()  # weights are processed after they were loaded
        return model

    def load_weights(self, model: Model, model_config: Any) -> None:
        self.read += 1
        model.weight.data.copy_(load_file(Path(model_config.model) / "model.safetensors")["weight"])


def register_model_loader(load_format: str) -> Callable[[Any], Any]:
    def register(loader: Any) -> Any:
        _LOADERS[load_format] = loader
        return loader

    return register


def get_model_loader(load_config: Any) -> Any:
    return _LOADERS.get(load_config.load_format, DefaultModelLoader)(load_config)
