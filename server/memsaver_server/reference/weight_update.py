"""Overwriting a model's weights in place."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import memsaver_core as ms


def parse_payload(payloads: Sequence[str], load_format: str | None) -> dict[str, Tensor]:
    """Return the tensors of an update request.

    Raises:
        ValueError: the payload is not one base64 safetensors image.
    """
    if load_format not in (None, "auto", "safetensors"):
        raise ValueError(f"load_format {load_format!r} is not supported; send safetensors, with no load_format")
    if isinstance(payloads, str) or len(payloads) != 1:
        raise ValueError("serialized_named_tensors must be a list of one payload: this engine has one rank")
    try:
        image = base64.b64decode(payloads[0], validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError(f"the payload is not base64: {error}") from None
    if image[:1] == b"\x80":
        raise ValueError(
            "the payload is a pickle, and reading a pickle runs code of its sender; "
            "send base64(safetensors.torch.save({name: tensor})) instead"
        )
    try:
        return safetensors.torch.load(image)
    except (SafetensorError, KeyError) as error:  # KeyError: an unknown dtype
        raise ValueError(f"the payload is not a safetensors image: {error}") from None


def write(model: nn.Module, given: Mapping[str, Tensor]) -> int:
    """Copy ``given`` over the model's tensors of the same names, all or none; return how many.

    Raises:
        ValueError: a name or shape differs from the model's; nothing was written.
        RuntimeError: the weights are released.
    """
    state = next((tag.state for tag in ms.status().tags if tag.tag == "weights"), "resident")
    if state != "resident":
        raise RuntimeError(f"the weights are {state}; resume them before updating them")
    # Tied tensors have several names.
    own: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    own.update(model.named_buffers(remove_duplicate=False))
    unknown = sorted(set(given) - set(own))
    if unknown:
        raise ValueError(f"the model has no {', '.join(unknown[:8])}; nothing was written")
    for name, tensor in given.items():
        if own[name].shape != tensor.shape:
            raise ValueError(f"{name} has shape {list(own[name].shape)}, not {list(tensor.shape)}; nothing was written")
    with torch.no_grad():
        for name, tensor in given.items():
            own[name].copy_(tensor.to(own[name].dtype))
    if any(tensor.device.type == "cuda" for tensor in own.values()):
        torch.cuda.synchronize()
    return len(given)
