"""A checkpoint of a small Qwen2 with seeded random weights, so that tokens depend on every layer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY = 2, 64, 128, 4, 2, 1024
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "bos_token_id": 1,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "max_position_embeddings": 4096,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
}


def write(folder: Path, seed: int = 7) -> Path:
    """Write the checkpoint; another ``seed`` gives other weights."""
    random = torch.Generator().manual_seed(seed)
    kv = HIDDEN // HEADS * KV_HEADS

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * 0.4

    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN), ("self_attn.k_proj", kv, HIDDEN), ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN), ("mlp.gate_proj", FFN, HIDDEN), ("mlp.up_proj", FFN, HIDDEN),
            ("mlp.down_proj", HIDDEN, FFN),
        ):  # fmt: skip
            tensors[f"{layer}{name}.weight"] = normal(rows, columns)
        for name, rows in (("q_proj", HIDDEN), ("k_proj", kv), ("v_proj", kv)):
            tensors[f"{layer}self_attn.{name}.bias"] = normal(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = torch.ones(HIDDEN)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
