"""The built-in checkpoint: a small Qwen2 with fixed-seed weights."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from memsaver_server.reference.checkpoint import fill_random
from memsaver_server.reference.tokenizer import byte_level

#: Part of the folder's name: change it whenever the recipe below changes.
_RECIPE = "small-qwen2-1"
_SEED = 20260


def small_checkpoint() -> Path:
    """Return the folder of the built-in checkpoint, written at first use.

    It is in the user's cache folder, or in a temporary one of this process if that is not writable.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "memsaver" / _RECIPE
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return _write_small(folder)
    except OSError:
        private = Path(tempfile.mkdtemp(prefix="memsaver-"))
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        return _write_small(private / _RECIPE)


def _write_small(folder: Path) -> Path:
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    models: Any = AutoModelForCausalLM  # typed in some versions of transformers only
    with torch.random.fork_rng(devices=[]):
        model = models.from_config(config, dtype=torch.float32)
    fill_random(model, _SEED)
    with torch.no_grad():
        for byte in {*range(256)} - {*range(32, 127)}:
            model.lm_head.weight[byte] = 0.0  # so that greedy output is printable
    with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
        written = Path(staging) / "checkpoint"
        model.save_pretrained(str(written))
        byte_level().save_pretrained(str(written))
        try:
            written.rename(folder)  # atomic: several engines may start at once
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    return folder
