"""Checkpoints of small models with seeded random weights, so that tokens depend on every layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

#: A dense model.
QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "bos_token_id": 1,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": 1024,
}
#: A model with experts.
MIXTRAL = {
    **QWEN,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
#: A dense model of which SGLang can compute the attention data-parallel.
QWEN3 = {
    **QWEN,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 16,
}
#: A dense model with a sliding window in one of its layers.
MELLUM = {
    **QWEN3,
    "architectures": ["MellumForCausalLM"],
    "model_type": "mellum",
    "layer_types": ["sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
    "moe_intermediate_size": 128,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e6} for kind in ("sliding_attention", "full_attention")
    },
    "sliding_window": 512,
    "tie_word_embeddings": False,
}
#: A model that has the states of a convolution in one of its layers.
LFM2 = {
    **QWEN,
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_auto_adjust_ff_dim": False,
    "conv_L_cache": 3,
    "conv_bias": False,
    "head_dim": 16,
    "layer_types": ["conv", "full_attention"],
    "norm_eps": 1e-5,
}
#: What makes either large enough for SGLang's kernels on a GPU; the heads are Qwen2-1.5B's.
WIDE = {
    "hidden_size": 1536,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "torch_dtype": "bfloat16",
}
#: What makes ``QWEN`` a draft model of EAGLE, which takes its embedding from the model that it drafts for.
EAGLE = {"architectures": ["Qwen2ForCausalLMEagle"], "num_hidden_layers": 1, "tie_word_embeddings": False}
#: What an adapter changes.
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj"]

Named = Iterator[tuple[str, torch.Tensor]]


def write(folder: Path, seed: int = 7, config: dict[str, Any] = QWEN) -> Path:
    """Write the checkpoint; another ``seed`` gives other weights."""
    weights = _Weights(config, seed)
    draft = config["architectures"] == EAGLE["architectures"]
    _save(folder, weights.of_draft() if draft else weights.of_model(), config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(folder: Path, config: dict[str, Any] = QWEN, rank: int = 8) -> Path:
    """Write a LoRA adapter for the attention of ``config``, large enough to change tokens."""
    weights = _Weights(config, seed=5)
    _save(folder, weights.of_adapter(rank), config, "adapter_model")
    adapter = {"peft_type": "LORA", "r": rank, "lora_alpha": 4 * rank, "target_modules": ADAPTED, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


def _save(folder: Path, named: Named, config: dict[str, Any], name: str = "model") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    kind = getattr(torch, config["torch_dtype"])
    save_file({name: tensor.to(kind) for name, tensor in named}, folder / f"{name}.safetensors", {"format": "pt"})


class _Weights:
    def __init__(self, config: dict[str, Any], seed: int) -> None:
        self._config = config
        self._random = torch.Generator().manual_seed(seed)
        self._hidden: int = config["hidden_size"]
        self._kv = self._hidden // config["num_attention_heads"] * config["num_key_value_heads"]
        self._scale = 3.2 / self._hidden**0.5
        self._is_lfm2 = config["model_type"] == "lfm2"

    def of_model(self) -> Named:
        yield "model.embed_tokens.weight", self._normal(self._config["vocab_size"], self._hidden)
        yield f"model.{'embedding_norm' if self._is_lfm2 else 'norm'}.weight", torch.ones(self._hidden)
        if not self._config["tie_word_embeddings"]:
            yield "lm_head.weight", self._normal(self._config["vocab_size"], self._hidden)
        for number in range(self._config["num_hidden_layers"]):
            kinds = self._config.get("layer_types", ())
            for name, tensor in self._layer_of_lfm2(kinds[number]) if self._is_lfm2 else self._layer():
                yield f"model.layers.{number}.{name}", tensor

    def of_draft(self) -> Named:
        yield "fc.weight", self._normal(self._hidden, 2 * self._hidden)
        yield "fc.bias", self._normal(self._hidden)
        for name, tensor in self._layer():
            if name != "input_layernorm.weight":
                yield f"layers.0.{name}", tensor

    def of_adapter(self, rank: int) -> Named:
        for number in range(self._config["num_hidden_layers"]):
            for projection in ADAPTED:
                name = f"base_model.model.model.layers.{number}.self_attn.{projection}"
                rows = self._kv if projection in ("k_proj", "v_proj") else self._hidden
                yield f"{name}.lora_A.weight", self._normal(rank, self._hidden)
                yield f"{name}.lora_B.weight", self._normal(rows, rank)

    def _layer(self) -> Named:
        hidden, ffn = self._hidden, self._config["intermediate_size"]
        for name, rows in (("q_proj", hidden), ("k_proj", self._kv), ("v_proj", self._kv), ("o_proj", hidden)):
            yield f"self_attn.{name}.weight", self._normal(rows, hidden)
            if self._config["model_type"] == "qwen2" and name != "o_proj":
                yield f"self_attn.{name}.bias", self._normal(rows)
        if "head_dim" in self._config:
            yield "self_attn.q_norm.weight", torch.ones(self._config["head_dim"])
            yield "self_attn.k_norm.weight", torch.ones(self._config["head_dim"])
        experts = self._config.get("num_local_experts", 0)
        if experts:
            yield "block_sparse_moe.gate.weight", self._normal(experts, hidden)
        names = [f"block_sparse_moe.experts.{each}.w{{}}.weight" for each in range(experts)] or ["mlp.{}_proj.weight"]
        parts = (1, 3, 2) if experts else ("gate", "up", "down")
        for name in names:
            for part, shape in zip(parts, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True):
                yield name.format(part), self._normal(*shape)
        yield "input_layernorm.weight", torch.ones(hidden)
        yield "post_attention_layernorm.weight", torch.ones(hidden)

    def _layer_of_lfm2(self, kind: str) -> Named:
        hidden, ffn = self._hidden, self._config["intermediate_size"]
        if kind == "conv":
            yield "conv.in_proj.weight", self._normal(3 * hidden, hidden)
            yield "conv.conv.weight", self._normal(hidden, 1, self._config["conv_L_cache"])
            yield "conv.out_proj.weight", self._normal(hidden, hidden)
        else:
            for name, rows in (("q_proj", hidden), ("k_proj", self._kv), ("v_proj", self._kv), ("out_proj", hidden)):
                yield f"self_attn.{name}.weight", self._normal(rows, hidden)
            for name in ("q_layernorm", "k_layernorm"):
                yield f"self_attn.{name}.weight", torch.ones(self._config["head_dim"])
        for name, shape in (("w1", (ffn, hidden)), ("w3", (ffn, hidden)), ("w2", (hidden, ffn))):
            yield f"feed_forward.{name}.weight", self._normal(*shape)
        for name in ("operator_norm", "ffn_norm"):
            yield f"{name}.weight", torch.ones(hidden)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random) * self._scale
