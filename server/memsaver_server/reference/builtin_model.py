"""The built-in checkpoint: a small Qwen2 with fixed-seed weights, and a tokenizer of bytes."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config
from transformers.convert_slow_tokenizer import bytes_to_unicode

from memsaver_server.reference.weights import fill_random

#: Part of the folder's name: change it whenever the recipe below changes.
_RECIPE = "small-qwen2-2"


def small_checkpoint() -> Path:
    """Return the built-in checkpoint's folder, written at its first use: in the user's cache or a temporary one."""
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
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        fill_random(model, seed=20260)
        model.lm_head.weight[:32] = model.lm_head.weight[127:] = 0.0  # so that greedy output is printable
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


def byte_level() -> Any:
    """Return a tokenizer whose ids are the bytes of the text, for models without one."""
    characters = bytes_to_unicode()
    backend = Tokenizer(models.BPE(vocab={character: byte for byte, character in characters.items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
