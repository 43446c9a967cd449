"""What the loaders of vLLM and SGLang need besides ``memsaver_core.load_weights``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

import memsaver_core as ms
from memsaver_core import process
from memsaver_core.manifests import revision_of

logger = logging.getLogger("memsaver")

#: As engines are asked for it: ``--load-format memsaver``.
LOAD_FORMAT = "memsaver"
#: The cache of rotary embeddings, which SGLang replaces by a longer one after it has loaded the weights.
MADE = "cos_sin_cache"


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters, and the buffers on the device, some of which loaders fill although checkpoints lack them;
    not what models make themselves: other buffers, and ``MADE``."""
    device = process.torch_device().type
    buffers = (
        (name, buffer)
        for name, buffer in model.named_buffers()
        if buffer.device.type == device and name.rpartition(".")[2] != MADE
    )
    return dict([*model.named_parameters(), *buffers])


def weights_key(model: str, config: Any, cache: str | None, **rest: Any) -> ms.WeightsKey | None:
    """Return the key of weights. ``config`` is the engine's configuration of ``model``: a folder, or one of the Hugging
    Face Hub, downloaded to ``cache`` (None: the usual folder). None, with a warning, if its files are not found."""
    path = Path(model)
    if not path.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", cache_dir=cache, revision=config.revision)
        path = Path(found).parent if isinstance(found, str) else path
    try:
        revision = revision_of(path)
    except OSError as error:
        logger.warning("weights are not shared, because their files are not found: %s", error)
        return None
    quantization = str(config.quantization or "")
    return ms.WeightsKey(model, revision, dtype=str(config.dtype), quantization=quantization, **rest)
