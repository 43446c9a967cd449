"""The tensors of a model, and the memory behind them."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; shared ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of the storages behind ``tensors``; shared ones count once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
