"""Checkpoints of a model's shape with seeded random weights, and prompts for them."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import torch
from _record import ROOT

CONFIG = ROOT / "tests" / "data" / "qwen2-1.5b" / "config.json"
PROMPTS = [
    [(7919 * (place + 3) * (number + 1)) % 150_000 + 10 for place in range(40 + 37 * number)] for number in range(4)
]
#: Values drawn once; each tensor takes them from another place on.
_DRAWN = 1 << 24


def write_checkpoint(config: Path, folder: Path, seed: int = 20) -> None:
    """Write a checkpoint of the shape of ``config``: seeded normal weights in bfloat16, of its initializer range.

    The file is written as it lies on disk (https://github.com/huggingface/safetensors#format), a tensor at a time: at
    the speed of the disk, and without holding all of it in memory.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.from_pretrained(config.parent)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if shape.tie_word_embeddings else set()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    drawn = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(seed)) * getattr(
        shape, "initializer_range", 0.02
    )
    weights, norms = (bytes(values.to(torch.bfloat16).view(torch.uint8).numpy()) for values in (drawn, 1 + drawn))

    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for number, (name, tensor) in enumerate(tensors.items()):
            values = memoryview(norms if name.endswith("norm.weight") else weights)
            at, left = 2 * (number * 10_007 % _DRAWN), 2 * tensor.numel()
            while left:
                left -= file.write(values[at : at + left])
                at = 0
    shutil.copy(config, folder / "config.json")
